"""Old ranges of shared topics in object storage: moved, merged, read through, deleted."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock.errors import Damaged, StorageFailed
from penstock.object_store import ObjectStore
from penstock.protocol.kafka_batch import NewRecord, batches_in
from penstock.topics.shared.catalog import SharedTopics
from tests.topics.shared.conftest import shared_topics
from tests.topics.shared.test_log import execute, values

AT_ONCE: dict[str, Any] = {"tier_delay": 0.0, "tier_interval": 3600.0, "tier_grace": 0.0}


@asynccontextmanager
async def moving(url: str, directory: Path, **settings: Any) -> AsyncIterator[SharedTopics]:
    """A broker whose mover runs when the test says so."""
    store = ObjectStore(f"file://{directory}")
    async with shared_topics(url, store, **{**AT_ONCE, **settings}) as topics:
        yield topics


async def rows(url: str) -> list[Any]:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetch("SELECT * FROM penstock.shared_batches ORDER BY last_offset")
    finally:
        await connection.close()


def objects(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.name[0] != "."]


async def test_moved_records_are_read_as_before_by_every_broker(
    database_url: str, tmp_path: Path
) -> None:
    async with moving(database_url, tmp_path) as here, moving(database_url, tmp_path) as there:
        log = await here.create("orders", 1)
        for i in range(50):
            await log.append_records([NewRecord(b"%d" % i, b"k", timestamp=1000 + i)])
        await log.append([b"x" * 3_000_000])
        assert await here.mover.step()
        assert not await there.mover.step()  # one at a time
        stored = await rows(database_url)
        assert all(row["data"] is None and row["object"] for row in stored)
        assert len(stored) <= 3
        assert len(objects(tmp_path)) == 1
        await log.append([b"later"])
        expected = [b"%d" % i for i in range(50)] + [b"x" * 3_000_000, b"later"]
        seen = await there.find("orders")
        assert seen is not None
        assert await values(seen) == expected
        assert await values(seen, 20) == expected[20:]
        assert await seen.read_through(lambda: seen.offset_at(1.017)) == 17
        fetched = await seen.read_through(lambda: seen.batches(7, 1))
        assert fetched.next_offset == 8


async def test_a_record_is_read_once_when_the_mover_merged_what_a_broker_has_in_memory(
    database_url: str, tmp_path: Path
) -> None:
    async with moving(database_url, tmp_path) as here, moving(database_url, tmp_path) as there:
        log = await here.create("orders", 1)
        seen = await there.find("orders")
        assert seen is not None
        await log.append([b"0"])
        seen.announced = 1
        await seen.catch_up()  # the first record as a chunk of its own
        await log.append([b"1"])
        assert await here.mover.step()
        assert len(await rows(database_url)) == 1
        await seen.refresh()
        assert await values(seen, 1) == [b"1"]  # the merged chunk, which begins with the first
        assert await values(seen) == [b"0", b"1"]


async def test_small_objects_are_merged_and_deleted_after_their_grace(
    database_url: str, tmp_path: Path
) -> None:
    async with moving(database_url, tmp_path) as topics:
        log = await topics.create("orders", 1)
        for i in range(6):
            await log.append([b"%d" % i])
            assert await topics.mover.step()
        assert len(await rows(database_url)) == 1
        await topics.mover.step()  # what was replaced in the last step goes now
        assert len(objects(tmp_path)) == 1
        assert await values(log) == [b"%d" % i for i in range(6)]


@pytest.mark.parametrize("newest_first", [True, False])
async def test_names_of_objects_say_which_has_an_offset_while_replaced_ones_are_deleted(
    database_url: str, tmp_path: Path, newest_first: bool
) -> None:
    """As a broker reads them while the database is down."""
    async with moving(database_url, tmp_path, tier_grace=3600.0) as topics:
        log = await topics.create("orders", 1)
        payload = b"x" * 400_000  # three of them are no small object any more
        for _ in range(9):
            await log.append([payload])
            assert await topics.mover.step()
        named = {str(tmp_path / row["object"]) for row in await rows(database_url)}
        replaced = [path for path in objects(tmp_path) if str(path) not in named]
        assert (len(named), len(replaced)) == (3, 6)
        for path in [*sorted(replaced, reverse=newest_first), None]:
            for offset in range(log.first_offset, log.next_offset):
                found = await topics.context.objects.find(log.directory, offset)
                assert found is not None
                assert found.base <= offset < found.end
                assert offset in [head.base_offset for _, head in batches_in(found.data)]
            if path is not None:
                path.unlink()
        assert await topics.context.objects.find(log.directory, log.next_offset) is None


@asynccontextmanager
async def frozen_after_writing(topics: SharedTopics) -> AsyncIterator[None]:
    """In the block, the mover has written an object and not yet said so to the database."""
    written, resume = asyncio.Event(), asyncio.Event()
    objects = topics.context.objects
    write = objects.write

    async def freeze(name: str, parts: Sequence[bytes]) -> None:
        await write(name, parts)
        written.set()
        await resume.wait()

    objects.write = freeze  # type: ignore[method-assign]
    step = asyncio.create_task(topics.mover.step())
    await written.wait()
    yield
    resume.set()
    await step


async def test_a_mover_that_was_frozen_in_the_middle_changes_nothing(
    database_url: str, tmp_path: Path
) -> None:
    """Another one took over meanwhile and moved the same range."""
    async with moving(database_url, tmp_path) as here, moving(database_url, tmp_path) as there:
        log = await here.create("orders", 1)
        await log.append([b"a", b"b"])
        async with frozen_after_writing(here):
            await execute(database_url, "UPDATE penstock.shared_mover SET until = '-infinity'")
            await there.read_catalog()
            assert await there.mover.step()
            assert len(await rows(database_url)) == 1
            moved = (await rows(database_url))[0]["object"]
        [row] = await rows(database_url)
        assert row["object"] == moved
        assert await values(log) == [b"a", b"b"]
        await execute(database_url, "UPDATE penstock.shared_removals SET due_at = '-infinity'")
        await there.mover.step()
        assert [path.name for path in objects(tmp_path)] == [Path(moved).name]  # no orphan is left


async def test_an_object_that_may_have_been_deleted_replaces_nothing(
    database_url: str, tmp_path: Path
) -> None:
    """The mover was frozen until another one counts its object as left behind."""
    async with moving(database_url, tmp_path) as topics:
        log = await topics.create("orders", 1)
        await log.append([b"a", b"b"])
        async with frozen_after_writing(topics):
            await execute(
                database_url, "UPDATE penstock.shared_removals SET due_at = clock_timestamp()"
            )
            [path] = objects(tmp_path)
            path.unlink()  # the other one was killed before it deleted its note
        [row] = await rows(database_url)
        assert row["object"] is None
        assert await values(log) == [b"a", b"b"]


async def test_a_store_that_fails_loses_nothing(database_url: str, tmp_path: Path) -> None:
    async with moving(database_url, tmp_path) as topics:
        log = await topics.create("orders", 1)
        await log.append([b"a"])
        objects = topics.context.objects
        write = objects.write

        async def fail(*_: Any) -> None:
            raise StorageFailed("no room")

        objects.write = fail  # type: ignore[method-assign]
        with pytest.raises(StorageFailed):
            await topics.mover.step()
        assert await values(log) == [b"a"]
        assert (await rows(database_url))[0]["object"] is None
        objects.write = write  # type: ignore[method-assign]
        assert await topics.mover.step()
        assert (await rows(database_url))[0]["object"]


async def test_a_damaged_object_is_reported_and_not_served(
    database_url: str, tmp_path: Path
) -> None:
    async with moving(database_url, tmp_path) as topics:
        log = await topics.create("orders", 1)
        await log.append([b"abc" * 100])
        await topics.mover.step()
        [path] = objects(tmp_path)
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
        topics.context.recent.clear()
        topics.context.older.clear()
        with pytest.raises(Damaged) as raised:
            await log.read_through(lambda: log.read(0))
        assert raised.value.resume == 1


async def test_retention_by_age_and_size_moves_the_first_offset(
    database_url: str, tmp_path: Path
) -> None:
    async with moving(database_url, tmp_path, retention_bytes=1000) as topics:
        log = await topics.create("orders", 1)
        for i in range(20):
            await log.append([bytes([i]) * 200])
        await topics.mover.step()
        assert 14 <= log.first_offset <= 17
        assert (await values(log, log.first_offset))[-1] == bytes([19]) * 200
        other = await topics.create("old", 1)
        await other.append_records([NewRecord(b"old", timestamp=1000)])
        await other.append_records([NewRecord(b"new")])
        await other.set_limits(other.limits.__class__(retention_age=60.0))
        await topics.mover.step()
        assert await values(other) == [b"new"]
        assert other.first_offset == 1


async def test_what_is_left_of_a_deleted_topic_goes(database_url: str, tmp_path: Path) -> None:
    async with moving(database_url, tmp_path) as topics:
        log = await topics.create("orders", 2)
        await log.append([b"a"])
        await topics.mover.step()
        await log.append([b"b"])
        await topics.delete("orders")
        await topics.mover.step()
        await topics.mover.step()
        assert not await rows(database_url)
        assert not objects(tmp_path)


async def test_moved_records_are_compacted_by_key(database_url: str, tmp_path: Path) -> None:
    async with moving(database_url, tmp_path) as here, moving(database_url, tmp_path) as there:
        log = await here.create("prices", 1)
        await log.set_policy("compact")
        for i in range(30):
            records = [NewRecord(b"%d" % i, b"key%d" % (i % 3)), NewRecord(b"plain%d" % i)]
            await log.append_records(records)
        await log.append_records([NewRecord(None, b"key0", timestamp=1)])  # an old tombstone
        await log.append_records([NewRecord(b"last", b"key1")])
        assert await here.mover.step()
        expected = [b"plain%d" % i for i in range(30)]
        expected.insert(29, b"29")  # of key2
        expected.append(b"last")
        seen = await there.find("prices")
        assert seen is not None
        assert await values(seen) == expected
        [stored] = await rows(database_url)
        assert (stored["base_offset"], stored["last_offset"], stored["records"]) == (0, 61, 32)
        await log.append([b"more"])
        await here.mover.step()
        await here.mover.step()  # the objects that were replaced are deleted
        assert len(objects(tmp_path)) == 1
        assert await values(seen) == [*expected, b"more"]


async def test_a_tombstone_stays_as_long_as_what_it_deletes(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.log.batches.by_key.MAX_KEYS", 1)
    async with moving(database_url, tmp_path) as topics:
        log = await topics.create("prices", 1)
        await log.set_policy("compact")
        for key, value in ((b"a", b"1"), (b"a", b"2"), (b"b", b"3"), (b"b", None), (b"a", b"4")):
            await log.append_records([NewRecord(value, key, timestamp=1)])
        assert await topics.mover.step()
        async with moving(database_url, tmp_path) as other:
            seen = await other.find("prices")
            assert seen is not None
            assert [value or None for value in await values(seen)] == [b"3", None, b"4"]


async def test_a_broker_whose_clock_is_ahead_does_not_delete_too_early(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_time = time.time
    monkeypatch.setattr("time.time", lambda: true_time() + 3600)
    async with moving(database_url, tmp_path, clock=time.time, retention_age=1800.0) as topics:
        log = await topics.create("orders", 1)
        await log.append([b"new"])
        assert await topics.mover.step()
        assert await values(log) == [b"new"]
