"""A PostgreSQL that is stopped, frozen or away when the broker starts."""

import pytest

from penstock.errors import Unavailable
from tests.conftest import create_database
from tests.support.buffers import freeze, thaw
from tests.support.database import started
from tests.support.wait import Stopwatch, eventually


async def test_a_stopped_server_fails_calls_at_once_and_is_noticed_when_it_returns(server, url):
    changes = []
    async with started(url) as database:
        database.on_change(changes.append)
        server.stop("immediate")
        with pytest.raises(Unavailable):
            await database.fetch("SELECT 1")
        assert not database.healthy
        watch = Stopwatch()
        for _ in range(100):
            with pytest.raises(Unavailable):
                await database.fetch("SELECT 1")
        assert watch.seconds < 0.5
        server.start()
        await eventually(lambda: database.healthy)
        assert await database.fetch("SELECT 1")
    assert changes == [False, True]


async def test_a_frozen_server_is_found_by_the_watchdog(server, url):
    async with started(url, acquire_timeout=0.5) as database:
        await database.fetch("SELECT 1")
        frozen = freeze(server)
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


@pytest.mark.usefixtures("url")  # the server runs again afterwards
async def test_a_server_that_is_down_at_start_is_migrated_when_it_comes_up(server):
    empty = await create_database(server, empty=True)
    server.stop()
    async with started(empty) as database:
        assert not database.healthy
        server.start()
        await eventually(lambda: database.healthy)
        assert await database.fetch("SELECT * FROM schema_files LIMIT 0") == []
