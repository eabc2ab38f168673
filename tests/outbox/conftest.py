"""One migrated database for all tests of the outbox: each has queues of its own."""

import asyncio
import uuid

import asyncpg
import pytest

from penstock.database.embedded import EmbeddedPostgres
from penstock.database.migrate import migrate
from penstock.queues.schema import SCHEMA
from tests.conftest import fresh_database


@pytest.fixture(scope="package")
def database_url(postgres: EmbeddedPostgres) -> str:
    url = fresh_database(postgres)

    async def prepare() -> None:
        connection = await asyncpg.connect(url)
        await migrate(connection, "penstock", SCHEMA)
        await connection.execute("CREATE TABLE effects (queue text, work text)")
        await connection.close()

    asyncio.run(prepare())
    return url


@pytest.fixture
def queue() -> str:
    return f"q{uuid.uuid4().hex[:12]}"
