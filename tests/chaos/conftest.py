"""A PostgreSQL for the tests of a module, which stop, freeze and kill it one after the other."""

from collections.abc import Iterator

import pytest

from penstock.database.embedded import EmbeddedPostgres
from tests.conftest import fresh_database, running_postgres


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture
def url(server: EmbeddedPostgres) -> Iterator[str]:
    server.start()
    yield fresh_database(server)
    server.start()
