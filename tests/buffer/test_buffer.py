"""Where a push goes, in which order it arrives, and what is on disk meanwhile."""

import asyncio
import json

import pytest

from penstock.buffer.files import parse
from penstock.errors import InvalidRequest, StorageFailed, StorageFull, Unavailable
from penstock.io.fs import DISK
from penstock.queues.types import Item
from tests.support.buffers import (
    Store,
    buffering,
    items,
    kill,
    killable,
    names,
    over_store,
    replayed,
)
from tests.support.faults import FaultyFs
from tests.support.wait import eventually, until


async def test_while_the_database_is_up_a_push_goes_straight_to_it(tmp_path):
    async with over_store(tmp_path) as (_, buffer):
        [result] = await buffer.push(items(1))
        assert result.status == "queued"
        assert names(tmp_path) == []


async def test_while_it_is_down_a_push_is_on_disk_before_the_answer_and_delivered_when_it_is_back(
    tmp_path,
):
    async with over_store(tmp_path) as (store, buffer):
        store.go(False)
        [result] = await buffer.push([Item("q", b'{"n":1}', "p", "tx")])
        assert (result.status, result.transaction_id) == ("buffered", "tx")
        [name] = names(tmp_path)
        assert name.startswith("failover_")
        assert name.endswith(".buf.tmp")
        assert json.loads((tmp_path / name).read_bytes())["payload"] == {"n": 1}
        assert buffer.status.report().pending == 1
        store.go(True)
        await eventually(lambda: store.payloads("q", "p") == [b'{"n":1}'])
        await eventually(lambda: names(tmp_path) == [])
        assert buffer.status.report().pending == 0
        assert (await buffer.push(items(2)))[0].status == "queued"


async def test_a_buffer_that_is_off_answers_no_push_before_the_database_has_it(tmp_path):
    async with over_store(tmp_path, enabled=False) as (store, buffer):
        assert not buffer.accepts()
        [result] = await buffer.push(items(1), buffer_ms=1000)  # QoS 0
        assert (result.status, store.payloads()) == ("queued", [b"1"])
        store.lost_answers = 1
        for _ in range(2):  # once with an unknown outcome, then with the database down
            with pytest.raises(Unavailable, match=r"buffer\.enabled"):
                await buffer.push(items(2))
            with pytest.raises(Unavailable, match=r"buffer\.enabled"):
                store.go(False)
                await buffer.push(items(3), buffer_ms=1000)
        store.go(True)
        assert (await buffer.push(items(4)))[0].status == "queued"
        assert names(tmp_path) == []
        assert buffer.status.report().pending == 0
    async with buffering(tmp_path / "on", store) as buffer:
        assert buffer.accepts()
    async with buffering(tmp_path / "full", store, max_bytes=0) as buffer:
        assert not buffer.accepts()


async def test_every_event_has_a_transaction_id_and_a_push_with_unknown_outcome_is_stored_once(
    tmp_path,
):
    async with over_store(tmp_path) as (store, buffer):
        store.lost_answers = 1
        [result] = await buffer.push(items("1"))
        assert result.status == "buffered"
        assert result.transaction_id
        await replayed(buffer)
        assert store.payloads() == [b"1"]


async def test_a_push_that_the_engine_would_refuse_is_refused_also_while_the_database_is_down(
    tmp_path,
):
    async with buffering(tmp_path, Store(healthy=False)) as buffer:
        for bad in (
            Item("q", b"1", trace_id="no uuid"),
            Item("q\0", b"1"),
            Item("q", b"1", transaction_id="\0"),
        ):
            with pytest.raises(InvalidRequest):
                await buffer.push([bad])
        assert names(tmp_path) == []


async def test_files_are_complete_at_events_per_file_and_sorted_by_time(tmp_path):
    async with buffering(tmp_path, Store(healthy=False), events_per_file=10) as buffer:
        for n in range(35):
            await buffer.push(items(n))
        result = names(tmp_path)
        assert [name.endswith(".tmp") for name in result] == [False, False, False, True]
        counts = [(tmp_path / name).read_bytes().count(b"\n") for name in result]
        assert counts == [10, 10, 10, 5]
        lines = b"".join((tmp_path / name).read_bytes() for name in result).splitlines()
        assert [json.loads(line)["payload"] for line in lines] == list(range(35))


async def test_new_pushes_go_behind_the_backlog_of_their_partition_and_only_of_theirs(tmp_path):
    async with over_store(tmp_path) as (store, buffer):
        store.go(False)
        await buffer.push(items(*range(1000), partition="a"))
        reached, go_on = asyncio.Event(), asyncio.Event()

        async def hold_replay(pushed):
            if pushed[0].partition == "a" and not go_on.is_set():
                reached.set()
                await go_on.wait()

        store.before = hold_replay
        store.go(True)
        await reached.wait()
        assert (await buffer.push(items(0, partition="b")))[0].status == "queued"
        assert (await buffer.push(items(1000, partition="a")))[0].status == "buffered"
        go_on.set()
        await replayed(buffer)
        assert (await buffer.push(items(1001, partition="a")))[0].status == "queued"
        assert store.payloads("q", "a") == [str(n).encode() for n in range(1002)]


async def test_behind_the_last_few_events_a_push_waits_and_then_goes_to_the_database(tmp_path):
    async with over_store(tmp_path) as (store, buffer):
        store.go(False)
        await buffer.push(items(0))
        reached, go_on = asyncio.Event(), asyncio.Event()

        async def hold_replay(pushed):
            reached.set()
            await go_on.wait()

        store.before = hold_replay
        store.go(True)
        await reached.wait()
        later = [asyncio.ensure_future(buffer.push(items(n))) for n in range(1, 6)]
        await asyncio.sleep(0.01)
        assert not any(push.done() for push in later)
        go_on.set()
        assert [(await push)[0].status for push in later] == ["queued"] * 5
        assert store.payloads() == [str(n).encode() for n in range(6)]


async def test_a_push_in_flight_when_the_database_goes_down_stays_ahead_of_later_ones(tmp_path):
    async with over_store(tmp_path) as (store, buffer):
        stuck = asyncio.Event()

        async def hang(pushed):
            await stuck.wait()

        store.before = hang
        first = asyncio.ensure_future(buffer.push(items(1)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        store.go(False)
        second = asyncio.ensure_future(buffer.push(items(2)))
        await asyncio.sleep(0.01)
        assert not second.done()
        stuck.set()
        assert (await first)[0].status == (await second)[0].status == "buffered"
        store.before = None
        store.go(True)
        await eventually(lambda: store.payloads() == [b"1", b"2"])


async def test_busy_producers_do_not_keep_a_partition_in_the_buffer_for_ever(tmp_path):
    store = Store()

    async def slow(pushed):
        await asyncio.sleep(0.002)

    async with buffering(tmp_path, store, max_batch=20) as buffer:
        store.go(False)
        sent = 0
        for _ in range(30):
            await buffer.push(items(*range(sent, sent + 100)))
            sent += 100
        store.before = slow
        store.go(True)
        statuses = []
        while not statuses or statuses[-1] != "queued":
            statuses.append((await buffer.push(items(*range(sent, sent + 5))))[0].status)
            sent += 5
            assert len(statuses) < 5000
        assert "buffered" in statuses
        assert store.payloads() == [str(n).encode() for n in range(sent)]


async def test_one_poison_event_is_set_aside_with_its_reason_and_the_rest_arrives(tmp_path):
    store = Store(healthy=False)
    store.poison = lambda item: item.payload == b"777"
    async with buffering(tmp_path, store) as buffer:
        await buffer.push(items(*range(2000)))
        store.go(True)
        await eventually(lambda: buffer.failed.events == 1)
        assert store.payloads() == [str(n).encode() for n in range(2000) if n != 777]
        [name] = names(tmp_path / "failed")[::2]
        assert json.loads((tmp_path / "failed" / name).read_bytes())["payload"] == 777
        [reason] = (tmp_path / "failed" / f"{name}.error").read_text().splitlines()
        assert json.loads(reason)["error"] == "the database refused the data of this request"
        assert buffer.status.report().failed == 1


async def test_failed_events_are_tried_again_after_the_retry_interval(tmp_path):
    store = Store(healthy=False)
    store.full = lambda item: item.payload in (b"1", b"3")
    async with buffering(tmp_path, store, retry_interval=0.05) as buffer:
        await buffer.push(items(0, 1, 2, 3))
        store.go(True)
        await eventually(lambda: buffer.failed.events == 2)
        store.full = lambda item: item.payload == b"3"
        await eventually(lambda: buffer.failed.events == 1)
        store.full = lambda item: False
        await eventually(lambda: buffer.failed.events == 0)
        assert store.payloads() == [b"0", b"2", b"1", b"3"]
        assert names(tmp_path / "failed") == []


async def test_failed_events_outlive_the_process(tmp_path):
    store = Store(healthy=False)
    store.poison = lambda item: True
    async with buffering(tmp_path, store) as buffer:
        await buffer.push(items(1))
        store.go(True)
        await eventually(lambda: buffer.failed.events == 1)
    store.poison = lambda item: False
    async with buffering(tmp_path, store) as buffer:
        await eventually(lambda: buffer.failed.events == 0)
        assert store.payloads() == [b"1"]


async def test_recovery_is_done_before_start_returns_failover_first_then_qos0(tmp_path, caplog):
    caplog.set_level("INFO")

    def file(name, *payloads):
        lines = [f'{{"queue":"q","payload":{p},"transaction_id":"{p}"}}\n' for p in payloads]
        (tmp_path / name).write_text("".join(lines))

    file("qos0_019a0c11-0000-7000-8000-0000aaaaaaaa.buf", 7)
    file("failover_019a0c11-0002-7000-8000-0000aaaaaaaa.buf.tmp", 3, 4)
    file("failover_019a0c11-0001-7000-8000-0000aaaaaaaa.buf", 1, 2)
    file("failover_019a0c11-7fe8.buf", 5, 6)

    async with over_store(tmp_path) as (store, buffer):
        assert store.payloads() == [b"1", b"2", b"3", b"4", b"5", b"6", b"7"]
        assert buffer.status.pending == 0
        assert names(tmp_path) == []
    assert "Failover: Progress 6/6 events (100.0%)" in caplog.text


async def test_with_the_database_down_at_start_it_serves_at_once_and_new_pushes_go_behind_the_old(
    tmp_path,
):
    async with over_store(tmp_path, healthy=False) as (store, buffer):
        await buffer.push(items(1, 2))
    assert [parse(name).active for name in names(tmp_path)] == [False]
    async with buffering(tmp_path, store) as buffer:
        assert buffer.status.report().pending == 2
        await buffer.push(items(3))
        store.go(True)
        await eventually(lambda: store.payloads() == [b"1", b"2", b"3"])


async def test_names_sort_by_time_even_when_the_clock_was_set_back(tmp_path, monkeypatch):
    store = Store(healthy=False)
    future = "failover_ffff0c11-0001-7000-8000-0000aaaaaaaa.buf"
    tmp_path.joinpath(future).write_text('{"queue":"q","payload":1,"transaction_id":"1"}\n')
    async with buffering(tmp_path, store) as buffer:
        await buffer.push(items(2))
    assert names(tmp_path)[0] == future
    async with buffering(tmp_path, store):
        store.go(True)
        await eventually(lambda: store.payloads() == [b"1", b"2"])


async def test_a_torn_last_line_and_damaged_lines_are_set_aside_and_the_rest_is_replayed(tmp_path):
    name = "failover_019a0c11-0001-7000-8000-0000aaaaaaaa.buf"
    good = [f'{{"queue":"q","payload":{n},"transaction_id":"{n}"}}\n' for n in range(3)]
    (tmp_path / f"{name}.tmp").write_bytes(
        (good[0] + good[1]).encode() + b"\0\0\0garbage\n" + good[2].encode() + b'{"queue":"q","pay'
    )

    async with over_store(tmp_path) as (store, buffer):
        assert store.payloads() == [b"0", b"1", b"2"]
        assert (tmp_path / "quarantine" / f"{name}.torn").read_bytes() == b'{"queue":"q","pay'
        assert (tmp_path / "quarantine" / f"{name}.bad").read_bytes() == b"\0\0\0garbage\n"
        assert buffer.status.report().quarantined == 2


async def test_a_damaged_line_in_failed_is_set_aside_too(tmp_path):
    name = "failover_019a0c11-0001-7000-8000-0000aaaaaaaa.buf"
    (tmp_path / "failed").mkdir()
    line = '{"queue":"q","payload":%d,"transaction_id":"%d"}\n'
    (tmp_path / "failed" / name).write_bytes(
        (line % (1, 1)).encode() + b"\xff\xff\n" + (line % (2, 2)).encode() + b"{"
    )
    (tmp_path / "failed" / f"{name}.error").write_text('{"line":1,"error":"the queue is full"}\n')

    async with over_store(tmp_path) as (store, buffer):
        await eventually(lambda: buffer.failed.events == 0)
        assert store.payloads() == [b"1", b"2"]
        assert (tmp_path / "quarantine" / f"failed_{name}.bad").read_bytes() == b"\xff\xff\n"
        assert (tmp_path / "quarantine" / f"failed_{name}.torn").read_bytes() == b"{"
        assert names(tmp_path / "failed") == []


async def test_the_byte_cap_refuses_clearly_and_gives_way_when_the_backlog_is_gone(tmp_path):
    async with over_store(tmp_path, healthy=False, max_bytes=1000) as (store, buffer):
        await buffer.push(items(f'"{"x" * 600}"'))
        size = buffer.status.bytes
        sealing = asyncio.create_task(buffer.journal.seal())
        await asyncio.sleep(0)
        # The pool has renamed the file, and the event loop has not heard of it: it waits here.
        until(lambda: names(tmp_path) and not any(tmp_path.glob("*.tmp")))
        assert not sealing.done()
        assert buffer.status.bytes == size > 600
        await sealing
        with pytest.raises(StorageFull, match="of 1000 bytes"):
            await buffer.push(items(f'"{"y" * 600}"'))
        store.go(True)
        await eventually(lambda: buffer.status.bytes == 0)
        store.go(False)
        await buffer.push(items(f'"{"z" * 600}"'))
        store.go(True)
        await replayed(buffer)
        assert [payload[1:2] for payload in store.payloads()] == [b"x", b"z"]


async def test_two_brokers_share_a_directory_and_the_survivor_adopts_the_dead_ones_files(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("penstock.buffer.buffer.ADOPT_SECONDS", 0.2)

    async with over_store(tmp_path, healthy=False) as (store, survivor):
        dead = await killable(tmp_path, store, DISK)
        await dead.push(items(1, 2, partition="dead"))
        await survivor.push(items(3, partition="own"))
        assert survivor.status.pending == 1  # it leaves the other's files alone
        assert len({parse(name).tag for name in names(tmp_path)}) == 2
        await kill(dead)
        await eventually(lambda: survivor.status.pending == 3)
        store.go(True)
        await eventually(lambda: store.payloads("q", "dead") == [b"1", b"2"])
        await eventually(lambda: names(tmp_path) == [])
        assert store.payloads("q", "own") == [b"3"]


async def test_the_replay_rate_is_kept(tmp_path):
    async with over_store(tmp_path, healthy=False, replay_rate=1000, max_batch=5) as (
        store,
        buffer,
    ):
        await buffer.push(items(*range(300)))
        began = asyncio.get_running_loop().time()
        store.go(True)
        await replayed(buffer)
        assert asyncio.get_running_loop().time() - began > 0.25


async def test_a_file_that_cannot_be_read_is_set_aside_and_the_next_ones_are_replayed(tmp_path):
    fs, store = FaultyFs(), Store(healthy=False)
    async with buffering(tmp_path, store, fs=fs, events_per_file=1) as buffer:
        await buffer.push(items(1, partition="bad"))
        await buffer.push(items(2, partition="good"))
        bad = next(path for path in sorted(fs.files) if "failover" in path.name)
        opened = fs.open

        def refusing(path, *, create=False, write=True):
            if path == bad and not write:
                raise StorageFailed(f"opening {path.name} failed: Input/output error")
            return opened(path, create=create, write=write)

        fs.open = refusing
        store.go(True)
        await eventually(lambda: store.payloads("q", "good") == [b"2"])
        await replayed(buffer)
        assert [path.name for path in fs.files if path.parent.name == "quarantine"] == [bad.name]
        assert buffer.status.report().quarantined == 1
