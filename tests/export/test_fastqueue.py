"""The two-layer queue: order, leases, recovery, damage. Real files."""

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import Locked
from penstock.export.sendqueue import store
from penstock.export.sendqueue.blocks import Block, BlockFile, ChunkReader
from penstock.export.sendqueue.journal import CRASH, DAMAGED, OLDEST, PURGED
from penstock.io.fs import DiskFile
from tests.export.making import FakeClock, balanced, block, number_of, opened, taken
from tests.support.wait import eventually

SMALL = {"inmemory_blocks": 4, "chunk_size": 2000}
NEVER = {"fsync": "never", "write_through": False}


def chunk_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if len(path.name) == 16)


@pytest.mark.parametrize(
    "policy", [{}, {"fsync": "interval"}, NEVER], ids=["always", "interval", "never"]
)
@pytest.mark.parametrize("compression", [0, 1, 2, 3])
async def test_blocks_come_out_in_order_through_memory_disk_and_a_restart(
    tmp_path: Path, policy: dict, compression: int
):
    options = SMALL | policy | {"compression": compression}
    queue = await opened(tmp_path, **options)
    for number in range(0, 100, 5):
        await queue.put([block(each) for each in range(number, number + 5)])
    first = await taken(queue, 30)
    await queue.close()
    again = await opened(tmp_path, **options)
    assert again.count == 70
    assert first + await taken(again) == list(range(100))
    assert again.books.delivered == 100
    await again.close()


async def test_reading_and_spilling_in_one_chunk_skip_nothing(tmp_path: Path):
    """The original's reader and writer share a file position: a spill between two reads makes it
    skip blocks.
    """

    queue = await opened(tmp_path, inmemory_blocks=3, chunk_size=1 << 20, **NEVER)
    result, pushed = [], 0
    for turn in range(60):
        for _ in range(turn % 7):
            await queue.put([block(pushed)])
            pushed += 1
        await asyncio.sleep(0)
        for _ in range(turn % 5):
            leased = await queue.take()
            if leased is not None:
                result.append(number_of(leased))
                queue.ack(leased)
    result += await taken(queue)
    assert result == list(range(pushed))
    assert len(chunk_files(tmp_path)) == 1
    await queue.close()


async def test_a_failed_block_returns_to_its_place_and_its_attempts_survive_a_restart(
    tmp_path: Path,
):
    queue = await opened(tmp_path, **SMALL)
    await queue.put([block(number) for number in range(10)])
    first, second = await queue.take(), await queue.take()
    queue.give_back(second)
    queue.give_back(first)
    order = [await queue.take(), await queue.take(), await queue.take()]
    assert [number_of(each) for each in order] == [0, 1, 2]
    assert [each.attempts for each in order] == [1, 1, 0]
    queue.give_back(order[0])
    await asyncio.sleep(0)
    queue.abandon()
    again = await opened(tmp_path, **SMALL)
    leased = await again.take()
    assert (number_of(leased), leased.attempts, leased.sequence) == (0, 2, 1)
    assert again.count == 10
    again.abandon()


async def test_a_killed_process_finds_what_it_leased_and_nothing_it_acknowledged(tmp_path: Path):
    queue = await opened(tmp_path, **SMALL)
    await queue.put([block(number) for number in range(20)])
    leased = [await queue.take() for _ in range(10)]
    for each in leased[::2]:
        queue.ack(each)
    await asyncio.sleep(0)  # the journal is written at the end of this turn of the loop
    queue.abandon()
    again = await opened(tmp_path, **SMALL)
    assert again.books.delivered == 5
    rest = [await again.take() for _ in range(15)]
    assert [number_of(each) for each in rest] == [1, 3, 5, 7, 9, *range(10, 20)]
    assert [each.sequence for each in rest[:5]] == [2, 4, 6, 8, 10]
    assert await again.take() is None
    again.abandon()


async def test_a_clean_stop_writes_memory_out(tmp_path: Path):
    queue = await opened(tmp_path, **NEVER)
    await queue.put([block(number) for number in range(50)])
    leased = await queue.take()
    assert not chunk_files(tmp_path)
    queue.give_back(leased, attempted=False)
    await queue.close()
    meta = json.loads((tmp_path / "fastqueue.meta").read_bytes())
    assert (meta["entry_count"], meta["name"], meta["version"]) == (50, "fastqueue", 2)

    again = await opened(tmp_path, **NEVER)
    assert await taken(again) == list(range(50))
    await again.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(chunk, bytes) of every read of a chunk."""
    collected: list[tuple[str, int]] = []
    original = ChunkReader.read_at

    def read_at(self: ChunkReader, chunk: BlockFile, place: int, length: int) -> bytes:
        data = original(self, chunk, place, length)
        collected.append((chunk.path.name, len(data)))
        return data

    monkeypatch.setattr(ChunkReader, "read_at", read_at)
    return collected


async def test_a_clean_start_reads_the_first_block_of_each_chunk_and_the_one_to_deliver(
    tmp_path: Path, reads: list[tuple[str, int]]
):
    queue = await opened(tmp_path, chunk_size=20_000)
    await queue.put([block(number) for number in range(1000)])
    await taken(queue, 300)
    await queue.close()
    assert len(chunk_files(tmp_path)) == 8
    reads.clear()
    again = await opened(tmp_path, chunk_size=20_000)
    assert again.count == 700
    assert sum(length for _, length in reads) < 10 * 300
    assert await taken(again) == list(range(300, 1000))
    await again.close()


@pytest.mark.parametrize("metadata", [True, False])
async def test_a_killed_queue_is_gone_through_in_its_last_chunk_only(
    tmp_path: Path, reads: list[tuple[str, int]], metadata: bool
):
    queue = await opened(tmp_path, chunk_size=20_000)
    await queue.put([block(number) for number in range(1000)])
    await taken(queue, 30)
    await queue.tick()
    await taken(queue, 30)
    await queue.put([block(number) for number in range(1000, 1010)])
    queue.abandon()
    if not metadata:
        (tmp_path / "fastqueue.meta").unlink()
    chunks = [path.name for path in chunk_files(tmp_path)]
    assert len(chunks) == 9
    reads.clear()
    again = await opened(tmp_path, chunk_size=20_000)
    assert again.count == 950
    read = {name: sum(length for each, length in reads if each == name) for name in chunks}
    assert max(read[name] for name in chunks[1:-1]) < 300, "sealed chunks: their first block only"
    assert read[chunks[-1]] < (4000 if metadata else 40_000)
    assert await taken(again) == list(range(60, 1010))
    await again.close()


async def test_a_record_that_is_a_piece_of_a_chunk_is_never_taken_for_a_block(tmp_path: Path):
    queue = await opened(tmp_path / "one")
    await queue.put([block(number) for number in range(5)])
    await queue.close()
    piece = chunk_files(tmp_path / "one")[0].read_bytes()
    other = await opened(tmp_path / "two")
    await other.put([block(0), Block(piece, 7), block(2)])
    await other.close()
    checksum_at = 160 + 12  # of the block that holds it
    damage(chunk_files(tmp_path / "two")[0], checksum_at)
    again = await opened(tmp_path / "two")
    assert await taken(again) == [0, 2]
    assert again.books.dropped[DAMAGED] == 7
    assert again.books.queued == 0
    await again.close()


async def test_what_is_spilled_while_the_newest_are_read_is_not_forgotten(tmp_path: Path):
    queue = await opened(tmp_path, **NEVER | {"inmemory_blocks": 4, "drain_order": "newest_first"})
    await queue.put([block(number) for number in range(20)])
    await eventually(lambda: len(queue.memory) == 0)
    loop, original, once = asyncio.get_running_loop(), queue.store.chunks.read, []

    async def spill_more() -> None:
        await queue.put([block(number) for number in range(20, 40)])
        await eventually(lambda: len(queue.memory) == 0)

    def read(*arguments: Any, **more: Any) -> Any:
        result = original(*arguments, **more)
        if not once:
            once.append(1)
            asyncio.run_coroutine_threadsafe(spill_more(), loop).result(10)
        return result

    queue.store.chunks.read = read
    assert await taken(queue) == list(range(39, -1, -1))
    await queue.close()


@pytest.mark.parametrize("cut", [1, 7, 60, 64, 100])
async def test_a_torn_tail_is_cut_at_the_last_whole_block(tmp_path: Path, cut: int):
    queue = await opened(tmp_path)
    await queue.put([block(number) for number in range(10)])
    queue.abandon()
    chunk = chunk_files(tmp_path)[0]
    with chunk.open("r+b") as file:
        file.truncate(chunk.stat().st_size - cut)
    again = await opened(tmp_path)
    assert chunk.stat().st_size == 9 * (64 + 96)
    assert [path.stat().st_size for path in (tmp_path / "quarantine").iterdir()] == [160 - cut]
    await again.put([block(77)])
    assert await taken(again) == [*range(9), 77]
    assert balanced(again)
    await again.close()


def damage(path: Path, at: int, flips: bytes = b"\xff") -> None:
    """Turn over these bits: a byte that is written over may have been the same before."""
    data = bytearray(path.read_bytes())
    for index, bits in enumerate(flips, at):
        data[index] ^= bits
    path.write_bytes(data)


@pytest.mark.parametrize(
    "where", [0, 8, 12, 20, 70], ids=["length", "magic", "checksum", "sequence", "body"]
)
@pytest.mark.parametrize("clean", [True, False])
async def test_a_bad_block_in_the_middle_is_set_aside_and_counted_and_the_rest_is_read(
    tmp_path: Path, where: int, clean: bool
):
    queue = await opened(tmp_path)
    await queue.put([block(number, records=number + 1) for number in range(10)])
    await (queue.close() if clean else queue.tick())
    if not clean:
        queue.abandon()
    damage(chunk_files(tmp_path)[0], 4 * 160 + where, b"\xff\xff\xff\x7f")
    again = await opened(tmp_path)
    assert await taken(again) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert again.books.dropped[DAMAGED] == 5  # exactly the records of block 4
    assert again.books.queued == 0
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    await again.close()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("clean", [True, False])
async def test_a_chunk_without_a_good_block_is_set_aside_and_its_records_are_counted(
    tmp_path: Path, which: int, clean: bool
):
    queue = await opened(tmp_path, chunk_size=800)
    await queue.put([block(number) for number in range(20)])
    await (queue.close() if clean else queue.tick())
    if not clean:
        queue.abandon()
    chunk = chunk_files(tmp_path)[which]
    chunk.write_bytes(b"\0" * chunk.stat().st_size)
    again = await opened(tmp_path, chunk_size=800)
    assert await taken(again) == [number for number in range(20) if number // 5 != which]
    assert (again.books.dropped[DAMAGED], again.books.dropped[CRASH]) == (5, 0)
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    await again.close()


@pytest.mark.parametrize(
    "wreck",
    [
        "meta missing",
        "meta garbage",
        "meta lies",
        "meta v1",
        "journal missing",
        "journal torn",
        "journal bit",
    ],
)
async def test_metadata_is_a_hint_and_a_lost_journal_costs_redelivery_only(
    tmp_path: Path, wreck: str
):
    queue = await opened(tmp_path, chunk_size=800)
    await queue.put([block(number) for number in range(20)])
    await taken(queue, 3)
    await queue.tick()
    await taken(queue, 2)
    await asyncio.sleep(0)
    queue.abandon()
    meta, journal = tmp_path / "fastqueue.meta", tmp_path / "fastqueue.log"
    if wreck == "meta missing":
        meta.unlink()
    elif wreck == "meta garbage":
        meta.write_bytes(b"{not json")
    elif wreck == "meta lies":
        lies = json.loads(meta.read_bytes()) | {
            "writer_offset": 3201,
            "reader_offset": 5,
        }
        meta.write_text(json.dumps(lies))
    elif wreck == "meta v1":  # as the seed's first version wrote it: the chunks are read
        meta.write_text(
            json.dumps({"name": "fastqueue", "reader_offset": 0, "writer_offset": 99, "version": 1})
        )
    elif wreck == "journal missing":
        journal.unlink()
    elif wreck == "journal torn":
        os.truncate(journal, journal.stat().st_size - 5)
    else:
        damage(journal, 40)
    again = await opened(tmp_path, chunk_size=800)
    result = await taken(again)
    assert result[-15:] == list(range(5, 20))
    if wreck.startswith("meta"):
        assert result == list(range(5, 20))
    assert set(result) <= set(range(20))
    assert again.books.queued == 0
    assert again.books.next_sequence == 21
    await again.close()


async def test_a_second_owner_of_the_directory_is_refused(tmp_path: Path):
    queue = await opened(tmp_path)
    with pytest.raises(Locked, match="in use by process"):
        await opened(tmp_path)
    await queue.close()
    await (await opened(tmp_path)).close()


async def test_under_never_a_kill_loses_memory_and_the_books_say_so(tmp_path: Path):
    clock = FakeClock()
    queue = await opened(tmp_path, clock=clock, stale_flush=30, **NEVER)
    await queue.put([block(number, records=2) for number in range(10)])
    clock.now += 31
    await queue.tick()  # the stale flush
    await queue.put([block(number, records=3) for number in range(10, 20)])
    leased = [await queue.take() for _ in range(14)]
    queue.ack(leased[13])  # from memory, never on disk: the only trace of 10..19 is in the journal
    await asyncio.sleep(0)
    queue.abandon()
    again = await opened(tmp_path, **NEVER)
    assert again.books.accepted == 10 * 2 + 10 * 3, "everything somebody was told we have"
    assert (again.books.delivered, again.books.dropped[4], again.books.queued) == (3, 9 * 3, 20)
    assert await taken(again) == list(range(10))
    await again.put([block(99)])
    assert (await again.take()).sequence == 21, "a number that may have been sent is not used again"
    await again.close()


async def test_memory_is_written_out_when_it_has_waited_for_stale_flush(tmp_path: Path):
    clock = FakeClock()
    queue = await opened(tmp_path, clock=clock, stale_flush=30, **NEVER)
    await queue.put([block(1)])
    clock.now += 29
    await queue.tick()
    assert not chunk_files(tmp_path)
    clock.now += 2
    await queue.tick()
    assert len(chunk_files(tmp_path)) == 1
    queue.abandon()
    again = await opened(tmp_path, **NEVER)
    assert await taken(again) == [1]
    await again.close()


async def test_pushes_that_come_together_share_a_write_and_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[str] = []
    for name in ("append", "sync"):
        original = getattr(DiskFile, name)

        def count(
            self: DiskFile, *arguments: Any, name: str = name, original: Any = original
        ) -> Any:
            if len(self.path.name) == 16:
                calls.append(name)
            return original(self, *arguments)

        monkeypatch.setattr(DiskFile, name, count)

    queue = await opened(tmp_path)
    await asyncio.gather(*(queue.put([block(number)]) for number in range(200)))
    assert calls.count("sync") <= 3
    assert calls.count("append") <= 3
    assert sorted(await taken(queue)) == list(range(200))
    await queue.close()


@pytest.mark.parametrize("policy", [{}, NEVER], ids=["always", "never"])
async def test_large_blocks_are_compressed_outside_the_event_loop(
    tmp_path: Path, policy: dict, monkeypatch: pytest.MonkeyPatch
):
    where: set[threading.Thread] = set()
    original = store.compress
    monkeypatch.setattr(
        store, "compress", lambda *a: where.add(threading.current_thread()) or original(*a)
    )

    queue = await opened(tmp_path, compression=1, inmemory_blocks=2, **policy)
    await queue.put([block(number, size=200_000) for number in range(10)])
    await eventually(lambda: queue.disk_bytes > 0 and len(queue.memory) <= 2)
    await queue.close()
    assert where
    assert threading.main_thread() not in where


@pytest.mark.parametrize("policy", [{}, NEVER], ids=["always", "never"])
async def test_newest_first_takes_the_newest_there_is(tmp_path: Path, policy: dict):
    options = {"inmemory_blocks": 5, "chunk_size": 1500, "drain_order": "newest_first"} | policy
    queue = await opened(tmp_path, **options)
    for number in range(0, 50, 10):
        await queue.put([block(each) for each in range(number, number + 10)])
    await queue.tick()
    collected = await taken(queue, 8)
    assert collected == list(range(49, 41, -1))
    await queue.put([block(each) for each in range(50, 60)])
    assert await taken(queue) == [*range(59, 49, -1), *range(41, -1, -1)]
    assert not queue.count
    await queue.close()
    assert (await opened(tmp_path, **options)).count == 0


async def test_newest_first_resumes_after_a_kill(tmp_path: Path):
    options = {"inmemory_blocks": 2, "chunk_size": 1500, "drain_order": "newest_first"}
    queue = await opened(tmp_path, **options)
    await queue.put([block(each) for each in range(200)])
    await taken(queue, 50)
    await asyncio.sleep(0)
    queue.abandon()
    again = await opened(tmp_path, **options)
    assert await taken(again) == list(range(149, -1, -1))
    await again.close()


async def test_mixed_gives_fresh_data_its_share_while_a_backlog_drains(tmp_path: Path):
    queue = await opened(tmp_path, inmemory_blocks=10, drain_order="mixed", fresh_share=0.25)
    await queue.put([block(number) for number in range(100)])
    collected = await taken(queue, 20)
    assert [number for number in collected if number >= 90] == [99, 98, 97, 96, 95]
    assert [number for number in collected if number < 90] == list(range(15))
    assert sorted(collected + await taken(queue)) == list(range(100))
    await queue.close()


async def test_consumed_chunks_are_deleted_and_an_emptied_queue_uses_no_disk(tmp_path: Path):
    queue = await opened(tmp_path, inmemory_blocks=4, chunk_size=1600)
    await queue.put([block(number) for number in range(100)])
    assert len(chunk_files(tmp_path)) == 10
    await taken(queue, 55)
    await queue.tick()
    assert len(chunk_files(tmp_path)) == 5
    await taken(queue)
    await queue.store.remove_completed_chunks(whole=True)
    assert not chunk_files(tmp_path)
    assert queue.bytes < 8192
    await queue.put([block(7)])
    await queue.close()
    again = await opened(tmp_path, chunk_size=1600)
    leased = await again.take()
    assert (number_of(leased), leased.sequence) == (7, 101)
    again.abandon()


async def test_the_journal_is_shortened_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("penstock.export.sendqueue.store.MAX_JOURNAL_BYTES", 2000)

    queue = await opened(tmp_path)
    await queue.put([block(number, records=3) for number in range(300)])
    for turn in range(250):
        leased = await queue.take()
        if turn % 50 == 49:
            queue.give_back(leased)
            leased = await queue.take()
        queue.ack(leased, dead=turn % 2)
        if turn % 20 == 0:
            await queue.tick()
    assert (tmp_path / "fastqueue.log").stat().st_size < 2000 + 32 * 25
    delivered, dead = queue.books.delivered, queue.books.dead
    await asyncio.sleep(0)
    queue.abandon()
    again = await opened(tmp_path)
    assert (again.books.delivered, again.books.dead, again.books.queued) == (
        delivered,
        dead,
        150,
    )
    assert await taken(again) == list(range(250, 300))
    await again.close()


async def test_dropping_the_oldest_counts_exactly_what_went(tmp_path: Path):
    queue = await opened(tmp_path, inmemory_blocks=5, chunk_size=1600)
    await queue.put([block(number, records=number) for number in range(1, 41)])
    held = await queue.take()
    assert await queue.drop_oldest(10, OLDEST) == (10, sum(range(2, 12)))
    queue.give_back(held)
    assert await taken(queue) == [1, *range(12, 41)]
    assert queue.books.dropped[OLDEST] == sum(range(2, 12))
    await queue.put([block(number) for number in range(30)])
    await queue.drop_oldest(1 << 60, PURGED)
    assert queue.count == 0
    assert queue.books.queued == 0
    await queue.close()
    again = await opened(tmp_path)
    assert again.count == 0
    assert balanced(again)
    await again.close()


async def test_a_queue_in_memory_keeps_order_and_books_without_a_disk():
    queue = await opened(None)
    await queue.put([block(number) for number in range(10)])
    assert await taken(queue) == list(range(10))
    assert queue.books.delivered == 10
    await queue.tick()
    await queue.close()


async def test_a_clock_that_jumps_changes_no_age(tmp_path: Path):
    clock = FakeClock()
    queue = await opened(tmp_path, clock=clock)
    await queue.put([block(1)])
    clock.now += 10
    clock.offset += 86_400  # the wall clock jumps a day ahead
    assert queue.oldest_age() == pytest.approx(10, abs=0.01)
    clock.offset -= 200_000
    assert queue.oldest_age() == pytest.approx(10, abs=0.01)
    queue.abandon()
    behind = FakeClock(now=1_600_000_000.0)  # after a restart the clock is years behind
    again = await opened(tmp_path, clock=behind)
    assert again.oldest_age() == 0
    assert await taken(again) == [1]
    await again.close()


@pytest.mark.parametrize("policy", [{}, NEVER], ids=["always", "never"])
async def test_the_reader_offset_of_the_metadata_moves_to_the_end_of_the_stream(
    tmp_path: Path, policy: dict
):
    def meta() -> dict[str, Any]:
        return json.loads((tmp_path / store.META).read_text())

    options = {"inmemory_blocks": 4, "chunk_size": 4 << 20, **policy}
    queue = await opened(tmp_path, **options)
    await queue.put([block(number, size=100_000) for number in range(100)])
    await queue.write_out()
    await queue.tick()
    assert meta()["reader_offset"] == 0
    offsets = []
    for _ in range(10):
        await taken(queue, 9)
        await queue.tick()
        offsets.append(meta()["reader_offset"])
    assert offsets == sorted(set(offsets)), "it moves"
    assert offsets[0] >= 8 * 100_000
    await taken(queue)
    await queue.tick()
    assert meta()["reader_offset"] == meta()["writer_offset"] > 100 * 100_000
    await queue.put([block(100)])
    await queue.close()
    again = await opened(tmp_path, **options)
    assert await taken(again) == [100]
    await again.close()
