"""Brokers of two releases work on one database at the same time."""

import os
import shutil
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from asyncpg.types import ServerVersion

import penstock
from penstock.database.migrate import SchemaFiles, drop_unused_functions, migrate
from penstock.errors import ConfigError
from penstock.queues.schema import SCHEMA
from tests.conftest import create_database
from tests.support.broker import ServeProcess

NEWER = replace(
    SCHEMA,
    migrations=(*SCHEMA.migrations, ("migrations/9999_later.sql", "CREATE TABLE later (id int)")),
    functions=(*SCHEMA.functions, ("functions/z.sql", "CREATE FUNCTION z() RETURNS int RETURN 1")),
)
MESSAGES = 60


@pytest.fixture
def other_release(tmp_path: Path) -> Path:
    """A copy of the package in which append has another name for its first argument, and a function
    that append calls answers something else.
    """
    package = tmp_path / "other" / "penstock"
    shutil.copytree(Path(penstock.__file__).parent, package)

    def change(path: str, old: str, new: str) -> None:
        text = (package / path).read_text()
        assert old in text, path
        (package / path).write_text(text.replace(old, new))

    functions = "queues/schema/functions"
    for caller in ("append.sql", "outbox_apply.sql"):
        change(f"{functions}/{caller}", "p_ids", "p_numbers")
    change("queues/calls.py", "    ids: list[int]", "    numbers: list[int]")
    change("queues/push.py", "ids=[", "numbers=[")
    change(
        f"{functions}/queue_wake.sql",
        "p_now timestamptz) RETURNS void",
        "p_now timestamptz, OUT woken boolean)",
    )
    return package.parent


@pytest.mark.parametrize("other_first", [False, True])
async def test_brokers_that_differ_in_a_function_push_and_pop_together(
    postgres, tmp_path: Path, other_release: Path, other_first: bool
) -> None:
    url = await create_database(postgres, empty=True)
    brokers = [
        ServeProcess(tmp_path / "one", database_url=url),
        ServeProcess(
            tmp_path / "two", database_url=url, env=os.environ | {"PYTHONPATH": str(other_release)}
        ),
    ]
    started = brokers[::-1] if other_first else brokers
    with started[0], ThreadPoolExecutor(4) as pool:
        # The first one is at work already when the second one starts.
        assert push(started[0], "before") == 201
        with started[1]:
            pushes = [
                pool.submit(push, brokers[n % 2], f"m{n}", f"p{n % 5}") for n in range(MESSAGES)
            ]
            pops = [pool.submit(pop, broker, pushes) for broker in brokers]
            assert {pushed.result() for pushed in pushes} == {201}
            received = [message for popped in pops for message in popped.result()]
    assert sorted(received) == sorted(["before", *(f"m{n}" for n in range(MESSAGES))])
    assert "functions are in penstock_fn_" in started[1].log
    assert await function_schemas(url) == 2


def push(broker: ServeProcess, payload: str, partition: str = "Default") -> int:
    item = {"queue": "q", "partition": partition, "payload": payload}
    return httpx.post(broker.url + "/api/v1/push", json={"items": [item]}, timeout=60).status_code


def pop(broker: ServeProcess, pushes: list[Any]) -> list[str]:
    """Pop and acknowledge until nothing is left after the last push."""
    received: list[str] = []
    with httpx.Client(base_url=broker.url, timeout=60) as client:
        while True:
            finished = all(pushed.done() for pushed in pushes)
            answer = client.get("/api/v1/pop/queue/q", params={"batch": 7, "wait": "false"})
            messages = answer.json()["messages"] if answer.status_code == 200 else []
            assert answer.status_code in (200, 204), answer.text
            for message in messages:
                names = ("transactionId", "partitionId", "leaseId")
                ack = {name: message[name] for name in names} | {"status": "completed"}
                assert client.post("/api/v1/ack", json=ack).json()[0]["success"]
                received.append(message["data"])
            if finished and not messages:
                return received


async def function_schemas(url: str) -> int:
    connection = await asyncpg.connect(url)
    count: int = await connection.fetchval("SELECT count(*) FROM penstock.function_schemas")
    await connection.close()
    return count


@asynccontextmanager
async def on(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def names(connection: Any) -> set[str]:
    rows = await connection.fetch("SELECT nspname FROM pg_namespace WHERE nspname ~ '_fn_'")
    return {row[0] for row in rows}


async def test_a_broker_that_has_worked_here_goes_on_after_a_newer_release_migrated(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with on(database_url) as connection:
        await migrate(connection, "penstock", SCHEMA)
        await migrate(connection, "penstock", NEWER)
        await migrate(connection, "penstock", SCHEMA)
        assert "migrated by a newer release of Penstock (migrations/9999_later.sql)" in caplog.text
        assert await names(connection) == {
            SCHEMA.function_schema("penstock"),
            NEWER.function_schema("penstock"),
        }


async def test_a_broker_that_meets_a_newer_schema_says_so_and_changes_nothing(
    database_url: str,
) -> None:
    async with on(database_url) as connection:
        await migrate(connection, "penstock", NEWER)
        with pytest.raises(ConfigError, match=r"9999_later.*Nothing was changed\. Start the newer"):
            await migrate(connection, "penstock", SCHEMA)
        assert await names(connection) == {NEWER.function_schema("penstock")}


async def test_a_server_that_is_too_old_is_refused_before_anything_is_changed() -> None:
    class OldServer:  # a connection that can be asked for its version, and for nothing else
        def get_server_version(self) -> ServerVersion:
            return ServerVersion(13, 22, 0, "final", 0)

    with pytest.raises(ConfigError, match="PostgreSQL 13 is too old: Penstock needs 14 or later"):
        await migrate(OldServer(), "penstock", SCHEMA)


async def test_functions_of_a_release_that_is_not_in_use_are_dropped_later(
    database_url: str,
) -> None:
    async with on(database_url) as connection:
        for sql in (SCHEMA, NEWER):
            await migrate(connection, "penstock", sql)
        await connection.execute("SET search_path TO penstock")
        assert await drop_unused_functions(connection, "penstock", NEWER) == []
        await connection.execute("UPDATE function_schemas SET seen_at = now() - interval '8 days'")
        dropped = await drop_unused_functions(connection, "penstock", NEWER)
        assert dropped == [SCHEMA.function_schema("penstock")]
        assert await names(connection) == {NEWER.function_schema("penstock")}
        assert await connection.fetch("SELECT * FROM queue_messages") == []  # the view needs none


def test_functions_of_tables_in_two_schemas_have_names_of_their_own() -> None:
    long = "s" * 60
    assert SCHEMA.function_schema("a") != SCHEMA.function_schema("b")
    assert SCHEMA.function_schema(long + "a") != SCHEMA.function_schema(long + "b")
    assert len(SCHEMA.function_schema(long)) <= 63
    assert isinstance(SCHEMA, SchemaFiles)
