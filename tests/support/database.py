"""A database as a broker uses it, for the length of a block."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.config import schema
from penstock.database import Database
from penstock.metrics import Metrics
from penstock.queues.schema import SCHEMA


@asynccontextmanager
async def started(url: str, **settings: Any) -> AsyncIterator[Database]:
    database = Database(
        schema.DatabaseSettings(url=url, **settings), Path("unused"), Metrics(), SCHEMA
    )
    await database.start()
    try:
        yield database
    finally:
        await database.stop()
