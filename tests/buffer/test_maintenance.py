"""Maintenance modes: shared through the database, remembered without it."""

import asyncio
import logging

from penstock.buffer.maintenance import Modes
from penstock.metrics import Metrics
from tests.support.buffers import Store, buffering, items, names, over_store
from tests.support.wait import eventually


async def test_pushes_stay_on_disk_until_it_is_switched_off_and_keep_their_order(tmp_path):
    async with over_store(tmp_path) as (store, buffer):
        await buffer.push(items(0))
        await buffer.push(items(1), buffer_ms=60_000)
        await buffer.maintenance.switch(push=True)
        assert (await buffer.push(items(2)))[0].status == "buffered"
        assert (await buffer.push(items(3), buffer_ms=10))[0].status == "buffered"
        await buffer.qos0.flush()
        assert store.payloads() == [b"0", b"1"]  # pushed before it began
        await buffer.maintenance.switch(push=False)
        await eventually(lambda: store.payloads() == [b"0", b"1", b"2", b"3"])


async def test_only_switching_it_on_is_worth_a_warning(tmp_path, caplog):
    caplog.set_level(logging.INFO, "penstock")

    async with buffering(tmp_path, Store()) as buffer:
        for push, pop in ((True, False), (True, True), (False, True), (False, False)):
            await buffer.maintenance.switch(push=push, pop=pop)
    records = [
        record.levelname
        for record in caplog.records
        if record.getMessage().startswith("maintenance:")
    ]
    assert records == ["WARNING", "WARNING", "WARNING", "INFO"]


async def test_every_broker_on_the_database_follows(tmp_path):
    store = Store()
    async with buffering(tmp_path / "a", store) as one, buffering(tmp_path / "b", store) as two:
        await one.maintenance.switch(push=True, pop=True)
        await eventually(lambda: two.maintenance.modes == Modes(push=True, pop=True))
        assert store.closed == [True, True]
        await two.maintenance.switch(push=False)
        await eventually(lambda: one.maintenance.modes == Modes(push=False, pop=True))


async def test_it_is_remembered_when_a_broker_starts_without_the_database(tmp_path):
    async with over_store(tmp_path) as (store, buffer):
        await buffer.maintenance.switch(push=True, pop=True)
    store.go(False)
    async with buffering(tmp_path, store) as buffer:
        assert buffer.maintenance.modes == Modes(push=True, pop=True)
        assert store.closed == [True, True]
        await buffer.push(items(1))
        store.go(True)
        await eventually(lambda: buffer.maintenance.modes == Modes(push=True, pop=True))
        assert store.payloads() == []
        assert len(names(tmp_path)) == 1


async def test_what_is_switched_while_the_database_is_down_reaches_it_later(tmp_path):
    store = Store()
    async with buffering(tmp_path / "a", store) as one, buffering(tmp_path / "b", store) as two:
        store.go(False)
        await one.maintenance.switch(pop=True)
        assert one.maintenance.modes.pop
        assert not two.maintenance.modes.pop
        store.go(True)
        await eventually(lambda: two.maintenance.modes.pop)
        assert one.maintenance.modes.pop


async def test_a_damaged_note_of_the_modes_is_no_reason_not_to_start(tmp_path):
    (tmp_path / "maintenance.json").write_bytes(b"{")

    async with buffering(tmp_path, Store(healthy=False)) as buffer:
        assert buffer.maintenance.modes == Modes()


async def test_a_change_told_while_the_last_one_is_being_read_is_not_missed(tmp_path):
    store = Store()
    async with buffering(tmp_path, store) as one, buffering(tmp_path, store) as two:
        read, seen, go_on, reading = store.fetch, asyncio.Event(), asyncio.Event(), 0

        async def slow(sql, *args):
            nonlocal reading
            rows = await read(sql, *args)
            if "INSERT" not in sql:
                seen.set()
                reading += 1
                await go_on.wait()  # the answer is on its way, and out of date
                reading -= 1
            return rows

        store.fetch = slow
        await one.maintenance.switch(push=True)
        await seen.wait()
        await one.maintenance.switch(push=False)
        go_on.set()
        await eventually(lambda: reading == 0)
        assert not two.maintenance.modes.push
        assert not one.maintenance.modes.push


async def test_a_mode_is_followed_after_a_read_that_failed_because_of_a_bug(tmp_path):
    store, metrics = Store(), Metrics()
    async with (
        buffering(tmp_path, store) as one,
        buffering(tmp_path, store, metrics=metrics) as two,
    ):
        read, failures = store.fetch, 2

        async def fail(sql, *args):
            nonlocal failures
            if "INSERT" not in sql and failures:
                failures -= 1
                raise RuntimeError("a bug")
            return await read(sql, *args)

        store.fetch = fail
        await one.maintenance.switch(push=True)
        await eventually(lambda: two.maintenance.modes.push)
    assert metrics.background_restarts.value("maintenance modes") == 1
