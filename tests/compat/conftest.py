"""One broker for the tests of Queen's published client, and a client of it."""

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from queen import Queen

from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess, quiet_broker


@pytest.fixture(scope="package")
def broker(postgres: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with quiet_broker(tmp_path_factory.mktemp("compat"), fresh_database(postgres)) as broker:
        yield broker


@asynccontextmanager
async def with_queen(broker: BrokerProcess, **options: Any) -> AsyncIterator[Queen]:
    """Connect a client. It takes over the signals, which are given back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        async with Queen(url=broker.url, **options) as queen:
            yield queen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
async def queen(broker: BrokerProcess) -> AsyncIterator[Queen]:
    async with with_queen(broker) as client:
        yield client
