import asyncio
import os
from pathlib import Path

import asyncpg
import pytest

from penstock.config import schema
from penstock.config.database_url import url_of
from penstock.database import Database
from penstock.database.connector import Connector
from penstock.errors import Busy, ConnectionLost, InvalidRequest, Unavailable
from penstock.metrics import Metrics
from penstock.queues.schema import SCHEMA
from tests.support.database import started
from tests.support.wait import eventually


async def test_a_fresh_database_is_migrated_and_answers(database_url):
    async with started(database_url) as database:
        assert database.healthy
        assert (await database.fetch("SELECT 40 + 2 AS answer"))[0]["answer"] == 42
        rows = await database.fetch("SELECT to_regclass('schema_files') IS NOT NULL AS there")
        assert rows[0]["there"]


async def test_several_brokers_may_migrate_at_once(database_url):
    databases = [
        Database(schema.DatabaseSettings(url=database_url), Path("unused"), Metrics(), SCHEMA)
        for _ in range(4)
    ]
    await asyncio.gather(*(database.start() for database in databases))
    assert all(database.healthy for database in databases)
    await asyncio.gather(*(database.stop() for database in databases))


async def test_a_killed_connection_is_not_taken_for_a_dead_server(database_url):
    async with started(database_url) as database:
        for _ in range(5):
            with pytest.raises(Unavailable):
                await database.fetch("SELECT pg_terminate_backend(pg_backend_pid())")
            assert database.healthy
            assert await database.fetch("SELECT 1")


async def test_a_read_whose_connection_is_lost_is_asked_again_on_another(database_url):
    async with started(database_url) as database:
        pid = (await database.fetch("SELECT pg_backend_pid()"))[0][0]
        suicide = (
            "SELECT CASE WHEN pg_backend_pid() = $1 THEN pg_terminate_backend($1) END, 1 AS answer"
        )
        assert (await database.read(suicide, pid))[0]["answer"] == 1
        with pytest.raises(ConnectionLost):
            await database.read("SELECT pg_terminate_backend(pg_backend_pid())")


async def test_a_listener_survives_the_loss_of_its_connection(database_url):
    heard = []
    async with started(database_url) as database:
        await database.listen("news", heard.append)
        await eventually(lambda: heard == [None])
        await database.fetch("SELECT pg_notify('news', 'first')")
        await eventually(lambda: heard == [None, "first"])
        await database.fetch(
            """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                   WHERE query ILIKE 'listen%' AND datname = current_database()"""
        )

        async def heard_again():
            await database.fetch("SELECT pg_notify('news', 'second')")
            return "second" in heard

        await eventually(heard_again)
        assert heard.count(None) == 2


def test_the_url_is_made_from_the_seeds_names_when_none_is_given():
    settings = schema.DatabaseSettings(
        host="one, two:5433", port=5432, name="shop", user="me", password="p@ss"
    )
    assert url_of(settings) == "postgresql://me:p%40ss@one:5432,two:5433/shop"


async def test_those_who_look_are_limited_and_keep_nobody_from_a_connection(
    database_url, monkeypatch
):
    monkeypatch.setattr("penstock.database.browse.WAIT_SECONDS", 0.2)

    async with started(database_url, pool_size=2, browse_pool_size=2, browse_timeout=2) as database:
        looking = [asyncio.create_task(database.browse("SELECT pg_sleep(60)")) for _ in range(8)]
        await asyncio.sleep(0)
        done = 0
        while not all(task.done() for task in looking):
            await database.fetch("SELECT pg_sleep(0.001)")
            done += 1
        texts = sorted(str(task.exception()) for task in looking)
        assert all(isinstance(task.exception(), Busy) for task in looking)
        assert [text.startswith("2 other requests are reading") for text in texts].count(True) == 6
        assert sum("database.browse_timeout" in text for text in texts) == 2
        assert done > 100
        assert database.healthy
        assert (await database.browse("SELECT 1 AS one"))[0]["one"] == 1


async def test_a_look_whose_connection_is_lost_is_asked_again_on_another(database_url):
    async with started(database_url) as database:
        pid = (await database.browse("SELECT pg_backend_pid()"))[0][0]
        suicide = (
            "SELECT CASE WHEN pg_backend_pid() = $1 THEN pg_terminate_backend($1) END, 1 AS answer"
        )
        assert (await database.browse(suicide, pid))[0]["answer"] == 1
        with pytest.raises(InvalidRequest):
            await database.browse("SELECT $1::text", "\0")


async def test_a_plain_role_may_ask_who_the_server_is_and_commit_a_probe(database_url):
    role = f"plain{os.getpid()}"
    connection = await asyncpg.connect(database_url)
    await connection.execute(
        f"CREATE ROLE {role} LOGIN; CREATE SCHEMA penstock AUTHORIZATION {role}"
    )
    name = await connection.fetchval("SELECT current_database()")
    await connection.execute(f'GRANT CREATE ON DATABASE "{name}" TO {role}')
    await connection.close()
    async with started(database_url.replace("postgres@", f"{role}@")) as database:
        assert database.healthy
        (seen,) = await Connector(database.settings, database.url, "public").survey()
        assert seen.server.timeline >= 1
        assert seen.server.system > 0
