"""QoS 0: written before the answer, batched into few calls, in order with everything else."""

import asyncio
import errno

from penstock.buffer.files import parse
from tests.support.buffers import Store, buffering, items, names, over_store
from tests.support.faults import FaultyFs
from tests.support.wait import eventually


async def test_a_qos0_push_is_in_the_file_before_the_answer_and_in_the_database_soon_after(
    tmp_path,
):
    async with over_store(tmp_path) as (store, buffer):
        [result] = await buffer.push(items(1), buffer_ms=50)
        assert result.status == "buffered"
        [name] = names(tmp_path)
        assert name.startswith("qos0_")
        assert (tmp_path / name).read_bytes().endswith(b"}\n")
        assert store.payloads() == []
        await eventually(lambda: store.payloads() == [b"1"])
        await eventually(lambda: names(tmp_path) == [])


async def test_many_single_pushes_become_few_calls(tmp_path):
    async with over_store(tmp_path) as (store, buffer):
        for n in range(1000):
            await buffer.push(items(n), buffer_ms=1000, buffer_max=100)
        await buffer.qos0.flush()
        assert store.payloads() == [str(n).encode() for n in range(1000)]
        assert len(store.calls) <= 30


async def test_it_is_flushed_when_the_smallest_buffer_max_is_reached(tmp_path):
    async with over_store(tmp_path) as (store, buffer):
        for n in range(9):
            await buffer.push(items(n), buffer_ms=60_000, buffer_max=10)
        await asyncio.sleep(0.05)
        assert store.payloads() == []
        await buffer.push(items(9), buffer_ms=60_000, buffer_max=1000)
        await eventually(lambda: len(store.payloads()) == 10)


async def test_it_is_flushed_when_the_shortest_buffer_ms_is_over(tmp_path):
    async with over_store(tmp_path) as (store, buffer):
        await buffer.push(items(1), buffer_ms=60_000)
        await buffer.push(items(2), buffer_ms=20)
        await eventually(lambda: store.payloads() == [b"1", b"2"])


async def test_a_plain_push_to_the_same_partition_goes_behind_what_waits(tmp_path):
    async with over_store(tmp_path) as (store, buffer):
        await buffer.push(items(1), buffer_ms=60_000)
        assert (await buffer.push(items(9, partition="other")))[0].status == "queued"
        assert store.payloads() == []
        assert (await buffer.push(items(2)))[0].status == "queued"
        assert store.payloads() == [b"1", b"2"]


async def test_when_the_database_goes_down_what_waits_moves_to_the_failover_file_in_order(tmp_path):
    async with over_store(tmp_path) as (store, buffer):
        await buffer.push(items(1), buffer_ms=60_000)
        store.go(False)
        await buffer.push(items(2))
        await buffer.push(items(3), buffer_ms=10)
        await eventually(lambda: [parse(name).kind for name in names(tmp_path)] == ["failover"])
        store.go(True)
        await eventually(lambda: store.payloads() == [b"1", b"2", b"3"])


async def test_a_batch_cut_off_in_the_middle_is_stored_once_and_stays_ahead(tmp_path):
    async with over_store(tmp_path, max_batch=1) as (store, buffer):
        for n in range(25):
            await buffer.push(items(n), buffer_ms=60_000, buffer_max=1000)
        calls = 0

        async def cut(pushed):
            nonlocal calls
            calls += 1
            if calls == 2:
                store.go(False)

        store.before = cut
        flushed = asyncio.create_task(buffer.qos0.flush())
        await eventually(lambda: not store.healthy)
        store.before = None
        await buffer.push(items(25))
        await flushed
        store.go(True)
        await eventually(lambda: len(store.payloads()) == 26)
        assert store.payloads() == [str(n).encode() for n in range(26)]


async def test_poison_among_qos0_events_is_set_aside_alone(tmp_path):
    store = Store()
    store.poison = lambda item: item.payload == b"5"
    async with buffering(tmp_path, store) as buffer:
        for n in range(10):
            await buffer.push(items(n), buffer_ms=60_000)
        await buffer.qos0.flush()
        assert store.payloads() == [str(n).encode() for n in range(10) if n != 5]
        assert buffer.status.report().failed == 1
        assert len(names(tmp_path / "failed")) == 2


async def test_without_room_on_the_disk_a_qos0_push_goes_to_the_database(tmp_path):
    store = Store()
    fs = FaultyFs()
    async with buffering(tmp_path, store, fs=fs) as buffer:
        fs.fail(1, errno.ENOSPC, forever=True, only={"append", "open"})
        assert (await buffer.push(items(1), buffer_ms=60_000))[0].status == "queued"
        fs.heal()
        assert (await buffer.push(items(2), buffer_ms=10))[0].status == "buffered"
        await eventually(lambda: store.payloads() == [b"1", b"2"])


async def test_a_slow_database_makes_pushes_wait_instead_of_filling_memory(tmp_path):
    store = Store()
    go_on = asyncio.Event()

    async def hang(pushed):
        await go_on.wait()

    store.before = hang
    async with buffering(tmp_path, store, events_per_file=10) as buffer:
        pushes = [
            asyncio.ensure_future(buffer.push(items(n), buffer_ms=5, buffer_max=5))
            for n in range(40)
        ]
        await asyncio.sleep(0.05)
        assert not all(push.done() for push in pushes)
        assert sum(len(batch.items) for batch in buffer.qos0.batches) <= 20
        go_on.set()
        await asyncio.gather(*pushes)
        await buffer.qos0.flush()
        assert len(store.payloads()) == 40


async def test_what_waits_long_is_synced_after_flush_interval(tmp_path):
    store = Store()
    fs = FaultyFs()
    async with buffering(tmp_path, store, fs=fs, flush_interval=0.02) as buffer:
        await buffer.push(items(1), buffer_ms=60_000)
        [inode] = [fs.files[path] for path in fs.files if "qos0" in path.name]
        assert inode.durable == b""
        await eventually(lambda: inode.durable.endswith(b"}\n"))
        await buffer.push(items(2), buffer_ms=60_000)
        await eventually(lambda: inode.durable.count(b"\n") == 2)


async def test_a_batch_whose_answer_was_lost_is_stored_once(tmp_path):
    async with over_store(tmp_path) as (store, buffer):
        for n in range(5):
            await buffer.push(items(n), buffer_ms=60_000)
        store.lost_answers = 2
        await buffer.qos0.flush()
        assert store.payloads() == [b"0", b"1", b"2", b"3", b"4"]
        assert buffer.failed.events == 0
