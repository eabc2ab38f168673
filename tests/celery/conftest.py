"""One broker for the tests that do not kill it. Each test has queues of its own."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.celery.support import Shop
from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess


@pytest.fixture(scope="package")
def broker(postgres: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    url = fresh_database(postgres)
    with BrokerProcess(tmp_path_factory.mktemp("celery"), database_url=url) as process:
        yield process


@pytest.fixture
def url(broker: BrokerProcess) -> str:
    return broker.url.replace("http://", "penstock://")


@pytest.fixture
def api(broker: BrokerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.url, timeout=60) as client:
        yield client


@pytest.fixture
def shop(tmp_path: Path, queue: str, url: str) -> Iterator[Shop]:
    with Shop(tmp_path, url, queue) as shop:
        yield shop


@pytest.fixture
def own_shop(tmp_path: Path, queue: str) -> Iterator[Shop]:
    """A shop whose test starts a broker of its own, and sets `url`."""
    with Shop(tmp_path, "", queue) as shop:
        yield shop


os.environ.setdefault("C_FORCE_ROOT", "1")
