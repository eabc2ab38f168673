"""A PostgreSQL that is stopped, frozen or away when the broker starts."""

import pytest

from penstock.errors import Unavailable
from tests.support.buffers import freeze, thaw
from tests.support.database import started
from tests.support.wait import Stopwatch, eventually


async def test_a_stopped_server_fails_calls_at_once_and_is_noticed_when_it_returns(own_postgres):
    changes = []
    async with started(own_postgres.url) as database:
        database.on_change(changes.append)
        own_postgres.stop("immediate")
        with pytest.raises(Unavailable):
            await database.fetch("SELECT 1")
        assert not database.healthy
        watch = Stopwatch()
        for _ in range(100):
            with pytest.raises(Unavailable):
                await database.fetch("SELECT 1")
        assert watch.seconds < 0.5
        own_postgres.start()
        await eventually(lambda: database.healthy)
        assert await database.fetch("SELECT 1")
    assert changes == [False, True]


async def test_a_frozen_server_is_found_by_the_watchdog(own_postgres):
    async with started(own_postgres.url, acquire_timeout=0.5) as database:
        await database.fetch("SELECT 1")
        frozen = freeze(own_postgres)
        try:
            watch = Stopwatch()
            with pytest.raises(Unavailable):
                await database.fetch("SELECT 1")
            assert watch.seconds < 3
            assert not database.healthy
        finally:
            thaw(frozen)
        await eventually(lambda: database.healthy)
        assert await database.fetch("SELECT 1")


async def test_a_server_that_is_down_at_start_is_migrated_when_it_comes_up(own_postgres):
    own_postgres.stop()
    async with started(own_postgres.url) as database:
        assert not database.healthy
        own_postgres.start()
        await eventually(lambda: database.healthy)
        assert await database.fetch("SELECT * FROM schema_files LIMIT 0") == []
