"""What several tests of the outbox do."""

import asyncio
from typing import Any

import asyncpg

from penstock.client.messages import Message as ClientMessage
from penstock.database.embedded import EmbeddedPostgres
from penstock.database.migrate import migrate
from penstock.queues import Delivered, Queues
from penstock.queues.schema import SCHEMA
from tests.conftest import fresh_database


def database_with_effects(postgres: EmbeddedPostgres) -> str:
    """A migrated database, with a table for what handlers do."""
    url = fresh_database(postgres)

    async def prepare() -> None:
        connection = await asyncpg.connect(url)
        await migrate(connection, "penstock", SCHEMA)
        await connection.execute("CREATE TABLE effects (queue text, work text)")
        await connection.close()

    asyncio.run(prepare())
    return url


def leased(message: Delivered) -> ClientMessage:
    """A message of the engine as the client hands it out."""
    return ClientMessage(
        id=message.id,
        transaction_id=message.transaction_id,
        created_at=message.created_at,
        partition=message.partition,
        partition_id=message.partition_id,
        lease_id=message.lease_id,
        consumer_group=message.group,
    )


async def rows(queues: Queues, sql: str, *args: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in await queues.database.fetch(sql, *args)]
