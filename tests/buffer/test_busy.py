"""What is not the events' fault and not an outage either: no key, no room in the database, too much
at once.
"""

import asyncio

import pytest

from penstock.buffer.maintenance import READ, Maintenance
from penstock.errors import Busy, InvalidRequest, MissingKey, Unavailable
from penstock.io.fs import DISK
from penstock.metrics import Metrics
from penstock.queues.types import Item, PopRequest
from tests.support.buffers import (
    Store,
    buffering,
    delivered,
    items,
    names,
    over_store,
    real,
    replayed,
)
from tests.support.database import started
from tests.support.wait import eventually


async def test_a_push_for_which_there_is_no_key_is_refused_and_lies_nowhere_in_clear(
    database_url, scratch
):
    async with real(database_url, scratch) as (buffer, queues):
        await buffer.push(items(1, queue="secret"))
        await queues.database.fetch("UPDATE queues SET encryption_enabled = true")
        queues.catalog.forget()
        with pytest.raises(MissingKey):
            await buffer.push(items('"clear"', queue="secret"))
        with pytest.raises(MissingKey):
            await buffer.push(items('"clear"', queue="secret"), buffer_ms=60_000)
        assert buffer.status.pending == 0
        assert names(buffer.directory) == names(buffer.directory / "failed") == []


SECRET, KEY, OTHER_KEY = '"4111 1111"', "11" * 32, "22" * 32


def all_bytes(directory):
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "remembered", [True, False], ids=["queue remembered", "queue not remembered"]
)
async def test_payloads_of_encrypted_queues_never_lie_in_clear_in_a_buffer_file(
    database_url, scratch, remembered
):
    async with real(database_url, scratch, key=KEY) as (buffer, queues):
        await buffer.push(items(1, queue="secret") + items(1, queue="open"))
        await queues.database.fetch("UPDATE queues SET encryption_enabled = name = 'secret'")
        queues.catalog.forget()
        if remembered:
            await buffer.push(items(2, queue="secret") + items(2, queue="open"))
        await buffer.maintenance.switch(push=True)
        await buffer.push(items(SECRET, queue="secret"))
        await buffer.push(items(SECRET, queue="secret"), buffer_ms=60_000)
        assert SECRET.encode() not in all_bytes(buffer.directory)
        if remembered:  # what is stored in clear is readable in the file too
            await buffer.push(items('"hello"', queue="open"))
            assert b'"hello"' in all_bytes(buffer.directory)
    # The broker was stopped with events in its files; one with another key must not lose them
    # or lay them open.
    async with real(database_url, scratch, key=OTHER_KEY) as (buffer, queues):
        await buffer.maintenance.switch(push=False)
        await eventually(lambda: buffer.failed.events == 2)
        assert SECRET.encode() not in all_bytes(buffer.directory)
    async with real(database_url, scratch, key=KEY) as (buffer, queues):
        await buffer.retry_failed(now=True)
        await eventually(lambda: buffer.failed.events == 0)
        got = await delivered(queues, "secret")
        assert got["Default"] == [
            b"1",
            *([b"2"] if remembered else []),
            SECRET.encode(),
            SECRET.encode(),
        ]
        stored = await queues.database.fetch(
            "SELECT payload FROM messages WHERE key_id IS NOT NULL"
        )
        assert len(stored) == 2 + remembered
        assert not any(SECRET.encode() in row["payload"] for row in stored)


async def test_qos0_events_of_encrypted_queues_are_sealed_in_their_file(database_url, scratch):
    async with real(database_url, scratch, key=KEY) as (buffer, queues):
        await buffer.push(items(1, queue="secret"))
        await queues.database.fetch("UPDATE queues SET encryption_enabled = true")
        queues.catalog.forget()
        await buffer.push(items(SECRET, queue="secret"), buffer_ms=60_000)
        assert names(buffer.directory)
        assert SECRET.encode() not in all_bytes(buffer.directory)
        await buffer.qos0.flush()
        assert (await delivered(queues, "secret"))["Default"] == [b"1", SECRET.encode()]


async def test_a_read_that_a_switch_overtakes_does_not_undo_it(database_url, scratch, monkeypatch):
    async with started(database_url) as database:
        modes, reading, fetch = [], 0, database.fetch
        maintenance = Maintenance(
            database, scratch, DISK, Metrics(), lambda: modes.append(maintenance.modes.push)
        )
        await maintenance.start()
        old, resume = asyncio.Event(), asyncio.Event()

        async def slowly(statement, *arguments):
            nonlocal reading
            reading += statement == READ
            rows = await fetch(statement, *arguments)
            if statement == READ:
                old.set()
                await resume.wait()
                reading -= 1
            return rows

        monkeypatch.setattr(database, "fetch", slowly)
        maintenance.settings_changed(None)
        await old.wait()
        await maintenance.switch(push=True)
        resume.set()
        await eventually(lambda: reading == 0)
        assert modes == [True]
        await maintenance.stop()


async def test_lines_of_a_buffer_file_can_be_handed_to_a_broker_as_they_are(database_url, scratch):
    async with real(database_url, scratch, key=KEY) as (buffer, queues):
        await buffer.maintenance.switch(push=True)
        await buffer.push([Item("q", SECRET.encode(), producer="alice")])
        await buffer.journal.seal()  # or the file changes its name under the glob
        lines = b"".join(path.read_bytes() for path in buffer.directory.glob("*.buf"))
        assert SECRET.encode() not in lines
        await buffer.maintenance.switch(push=False)
        await replayed(buffer)
        _, [pushed] = await buffer.push_lines(lines)
        assert pushed.status == "duplicate"
        await queues.database.fetch("DELETE FROM messages")
        _, [pushed] = await buffer.push_lines(lines)
        assert pushed.status == "queued"
        popped = await queues.pop(PopRequest(queue="q", auto_ack=True))
        assert (popped.messages[0].payload, popped.messages[0].producer) == (
            SECRET.encode(),
            "alice",
        )
        for bad in (lines[:-1], lines.replace(b'"q"', b'"r"'), b"{}\n"):
            with pytest.raises(InvalidRequest, match="not an event, or is damaged"):
                await buffer.push_lines(bad)


async def test_a_database_without_room_is_waited_for_and_order_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.buffer.buffer.MAX_REPLAY_PAUSE_SECONDS", 0.1)

    store = Store()
    tries = 0

    async def no_room(pushed):
        nonlocal tries
        tries += 1
        raise Busy("the database cannot write")

    async with buffering(tmp_path, store) as buffer:
        store.before = no_room
        for n in range(5):
            assert (await buffer.push(items(n)))[0].status == "buffered"
        await buffer.push(items(5), buffer_ms=1)
        await eventually(lambda: tries > 8)  # it goes on trying, and blames no event
        assert buffer.failed.events == 0
        store.before = None
        await replayed(buffer)
        assert (await buffer.push(items(6)))[0].status == "queued"
        assert store.payloads() == [b"%d" % n for n in range(7)]


async def test_a_qos0_push_that_waited_while_the_database_went_down_goes_behind_what_was_before(
    tmp_path,
):
    store = Store()
    go_on = asyncio.Event()

    async def hang(pushed):
        await go_on.wait()

    async with buffering(tmp_path, store, events_per_file=2) as buffer:
        store.before = hang
        for n in range(4):
            await buffer.push(items(n), buffer_ms=60_000, buffer_max=2)
            await asyncio.sleep(0)
        waiting = asyncio.ensure_future(buffer.push(items(4), buffer_ms=60_000))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        store.go(False)
        go_on.set()
        await waiting
        await buffer.push(items(5))
        assert not buffer.qos0.busy  # or 4 would wait there until its time has come
        store.before = None
        store.go(True)
        await eventually(lambda: len(store.payloads()) == 6)
        assert store.payloads() == [b"%d" % n for n in range(6)]


async def test_a_transactions_pushes_do_not_overtake_what_is_buffered(tmp_path):
    async with over_store(tmp_path) as (store, buffer):
        await buffer.push(items(1), buffer_ms=60_000)
        await buffer.wait_until_drained(items(2))
        assert store.payloads() == [b"1"]  # it was committed first
        store.go(False)
        await buffer.push(items(3))
        with pytest.raises(Unavailable):
            await buffer.wait_until_drained(items(4))
        await buffer.wait_until_drained(
            items(4, partition="other")
        )  # the database will say that it is down
        store.go(True)
        await buffer.wait_until_drained(items(4))
        assert store.payloads() == [b"1", b"3"]
        await buffer.maintenance.switch(push=True)
        with pytest.raises(Unavailable, match="maintenance"):
            await buffer.wait_until_drained(items(5))


@pytest.mark.parametrize("milliseconds", [0, 10**18, 10**400])
async def test_however_long_a_push_may_wait_it_is_answered_and_stored(tmp_path, milliseconds):
    async with over_store(tmp_path) as (store, buffer):
        [result] = await buffer.push([Item("q", b"1")], buffer_ms=milliseconds, buffer_max=10**400)
        assert result.status == "buffered"
        await buffer.qos0.flush()
        assert store.payloads() == [b"1"]
