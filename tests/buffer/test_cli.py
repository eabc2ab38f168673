"""`penstock buffer` on a directory: what it shows, what it refuses, and a replay without a broker."""

import asyncio
import json

import pytest

import penstock.cli.buffer  # noqa: F401  (registers its commands)
from penstock.cli import app
from tests.support.buffers import Store, buffering, delivered, items, names, real
from tests.support.cli import CliRunner
from tests.support.wait import eventually


def command(*arguments, code=0):
    result = CliRunner().invoke(app, ["buffer", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
async def left(tmp_path):
    """A directory that a broker left: five events waiting, one refused."""
    store = Store(healthy=False)
    store.poison = lambda item: item.payload == b"0"
    async with buffering(tmp_path, store) as buffer:
        await buffer.push(items(0))
        store.go(True)
        await eventually(lambda: buffer.failed.events)
        store.go(False)
        await buffer.push(items(1, 2, 3, 4, 5, queue="orders"))
    return tmp_path


def test_list_shows_what_waits_and_what_failed(left):
    rows = json.loads(command("list", "--dir", left, "--json").stdout)
    assert [(row["state"], row["owner"], row["events"]) for row in rows] == [
        ("waiting", "dead", 5),
        ("failed", "dead", 1),
    ]
    assert command("list", "--dir", left).stdout.count("\n") == 3  # the header too


def test_inspect_prints_events_and_why_they_failed(left):
    [name] = names(left)
    lines = command("list", name, "--dir", left, "-n", 3).stdout.splitlines()
    assert [json.loads(line)["payload"] for line in lines if line.startswith("{")] == [1, 2, 3]
    failed = command("list", names(left / "failed")[0], "--dir", left)
    assert "refused" in failed.output


async def test_purge_deletes_only_what_is_named_and_never_a_living_brokers_files(left):
    command("purge", "--dir", left, "--yes", code=2)
    command("purge", "--failed", "--dir", left, code=2)  # nobody to ask
    command("purge", "--failed", "--dir", left, "--yes")
    assert names(left / "failed") == []
    [name] = names(left)
    async with buffering(left, Store(healthy=False)):
        await asyncio.to_thread(command, "purge", name, "--dir", left, "--yes", code=1)
    assert names(left) == [name]
    command("purge", name, "--dir", left, "--yes")
    assert names(left) == []


async def test_replay_into_a_database_without_a_broker(left, database_url, scratch):
    where = ("--dir", left, "--database-url", database_url)
    await asyncio.to_thread(command, "replay", *where)
    assert names(left) == []
    await asyncio.to_thread(command, "replay", "--failed", *where)
    assert names(left / "failed") == []
    async with real(database_url, scratch) as (_, queues):
        assert await delivered(queues, "orders") == {"Default": [b"1", b"2", b"3", b"4", b"5"]}
        assert await delivered(queues, "q") == {"Default": [b"0"]}


def test_without_a_broker_it_says_so(tmp_path):
    result = command("status", "--url", "http://127.0.0.1:9", code=1)
    assert "penstock:" in result.output
    command("list", "--dir", tmp_path / "nowhere", code=2)
