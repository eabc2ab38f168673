"""One broker for all tests of the HTTP contract of queues, on the wire, with a real PostgreSQL."""

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.conftest import fresh_database
from tests.support.api import Api
from tests.support.broker import BrokerProcess, quiet_broker

MICROS = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$")
MILLIS = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")


@pytest.fixture(scope="package")
def broker(postgres, tmp_path_factory) -> Iterator[BrokerProcess]:
    with quiet_broker(tmp_path_factory.mktemp("api"), fresh_database(postgres)) as broker:
        yield broker


@pytest.fixture
def api(broker) -> Iterator[Api]:
    with httpx.Client(base_url=broker.url, timeout=30) as client:
        yield Api(client)
