"""Shared topics on a database of the test's own, as two brokers see them."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import TopicsSettings
from penstock.database.embedded import EmbeddedPostgres
from penstock.log.context import Instruments
from penstock.metrics import Metrics
from penstock.object_store import ObjectStore
from penstock.topics.shared.catalog import SharedTopics
from tests.conftest import fresh_database
from tests.support.database import started
from tests.support.wait import DATABASE_TIMEOUT

Broker = Callable[..., AbstractAsyncContextManager[SharedTopics]]


@asynccontextmanager
async def shared_topics(
    url: str,
    store: ObjectStore | None = None,
    acquire_timeout: float = DATABASE_TIMEOUT,
    clock: Callable[[], float] = time.time,
    saved: Path | None = None,
    **settings: Any,
) -> AsyncIterator[SharedTopics]:
    """What a broker has of shared topics, for the length of a block."""
    async with started(url, acquire_timeout=acquire_timeout) as database:
        metrics = Metrics()
        topics = SharedTopics(
            database, TopicsSettings(**settings), Instruments(metrics), metrics, store, clock, saved
        )
        await topics.start()
        try:
            yield topics
        finally:
            await topics.stop()


@pytest.fixture
def database_url(postgres: EmbeddedPostgres) -> str:
    return fresh_database(postgres, migrated=True)


@pytest.fixture
async def broker(database_url: str) -> AsyncIterator[SharedTopics]:
    async with shared_topics(database_url) as topics:
        yield topics


@pytest.fixture
async def pair(database_url: str) -> AsyncIterator[tuple[SharedTopics, SharedTopics]]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(shared_topics(database_url))
        second = await stack.enter_async_context(shared_topics(database_url))
        yield first, second
