"""One broker for all tests of the HTTP contract of queues, on the wire, with a real PostgreSQL."""

import re
import uuid
from collections.abc import Iterator

import httpx
import pytest

from tests.conftest import fresh_database
from tests.support.api import Api
from tests.support.broker import BrokerProcess

MICROS = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$")
MILLIS = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")


@pytest.fixture(scope="package")
def broker(postgres, tmp_path_factory) -> Iterator[BrokerProcess]:
    with BrokerProcess(
        tmp_path_factory.mktemp("api"), database_url=fresh_database(postgres)
    ) as process:
        yield process
        process.stop()
        assert [line for line in process.log.splitlines() if '"level":"error"' in line] == []


@pytest.fixture
def api(broker) -> Iterator[Api]:
    with httpx.Client(base_url=broker.url, timeout=30) as client:
        yield Api(client)


@pytest.fixture
def queue() -> str:
    return f"q-{uuid.uuid4().hex[:12]}"
