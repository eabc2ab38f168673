"""One broker for the tests of the client that do not kill it; each test has queues of its own."""

import uuid
from collections.abc import Iterator

import pytest

from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess


@pytest.fixture(scope="package")
def broker(postgres, tmp_path_factory) -> Iterator[BrokerProcess]:
    with BrokerProcess(
        tmp_path_factory.mktemp("client"), database_url=fresh_database(postgres)
    ) as process:
        yield process


@pytest.fixture
def queue() -> str:
    return f"q-{uuid.uuid4().hex[:12]}"
