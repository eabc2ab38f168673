"""A fresh database for each test, copied from one that is migrated already: the schema is not what
is tested here.
"""

import asyncio
import uuid

import asyncpg
import pytest

from penstock.database.embedded import EmbeddedPostgres
from penstock.database.migrate import migrate
from penstock.queues.schema import SCHEMA
from tests.conftest import fresh_database


@pytest.fixture(scope="session")
def template(postgres: EmbeddedPostgres) -> str:
    url = fresh_database(postgres)

    async def prepare() -> str:
        connection = await asyncpg.connect(url)
        await migrate(connection, "penstock", SCHEMA)
        name: str = await connection.fetchval("SELECT current_database()")
        await connection.close()
        return name

    return asyncio.run(prepare())


@pytest.fixture
def database_url(postgres: EmbeddedPostgres, template: str) -> str:
    name = f"t{uuid.uuid4().hex}"

    async def create() -> None:
        connection = await asyncpg.connect(postgres.url)
        await connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        await connection.close()

    asyncio.run(create())
    return postgres.url.replace("/postgres?", f"/{name}?")
