"""Tests of the engine begin with a schema: how it gets there is not what is tested here."""

from collections.abc import AsyncIterator

import pytest

from penstock.database.embedded import EmbeddedPostgres
from penstock.queues import Queues
from tests.conftest import fresh_database
from tests.queues.support import running


@pytest.fixture
def database_url(postgres: EmbeddedPostgres) -> str:
    return fresh_database(postgres, migrated=True)


@pytest.fixture
async def queues(database_url: str) -> AsyncIterator[Queues]:
    """An engine on a database of this test's own."""
    async with running(database_url) as engine:
        yield engine
