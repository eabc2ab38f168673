"""One broker for the tests of the client that do not kill it; each test has queues of its own."""

from collections.abc import Iterator

import pytest

from tests.conftest import fresh_database
from tests.support.broker import BrokerProcess


@pytest.fixture(scope="package")
def broker(postgres, tmp_path_factory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("client")
    with BrokerProcess(directory, database_url=fresh_database(postgres)) as broker:
        yield broker
