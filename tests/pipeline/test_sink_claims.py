"""What a sink's identity promises: the same content, or nothing; in topics' files and in PostgreSQL
alike.
"""

import asyncio
import random
import tempfile
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructType

from penstock.errors import Conflict, Full, Unavailable
from penstock.io.journal import events
from penstock.net.topic_link import TopicLink
from penstock.pipeline.options import TopicSinkOptions
from penstock.pipeline.sinks import held_rows, identity
from penstock.pipeline.sinks.held_rows import Checksum, Held
from penstock.pipeline.sinks.identity import rejection, wait_for_turn
from penstock.pipeline.sinks.queue import PushLink
from penstock.pipeline.sinks.topic import TopicWriter
from penstock.protocol.sink_claims import Claim, Claimed, Commit
from penstock.queues.admin.sinks import forget_idle_sinks
from penstock.queues.options import QueueOptions
from penstock.queues.types import Item
from penstock.topics.write_claims import FIELDS, JOURNAL, WriteClaims
from tests.queues.support import running


def claim(
    batch: int, task: int, checksum: str, run: str, keys: str = "", target: str = "out"
) -> Claim:
    return Claim(target, "app", batch, task, checksum, run, keys=keys)


async def finish(sinks: Any, batch: int, task: int, app: str = "app") -> None:
    """Record that a task has written its rows, as its sink does."""
    place = Commit("out", app, batch, task)
    if isinstance(sinks, WriteClaims):
        await sinks.commit(place)
    else:
        await sinks.push(
            place, 0, [Item("out", b"1", transaction_id=f"{app} {batch} {task}")], last=True
        )


async def check_rules(sinks: Any) -> None:
    async def verdict(*place: Any) -> str:
        return (await sinks.claim(claim(*place))).verdict

    assert await verdict(0, 0, "a", "first", "k") == "write"
    assert await verdict(0, 2, "c", "first") == "write"
    assert await verdict(0, 0, "a", "first", "k") == "write"  # a task that is tried again
    await finish(sinks, 0, 0)
    # The batch is run again: a task that has no place comes after those that have one.
    waiting = await sinks.claim(claim(0, 1, "b", "second"))
    assert (waiting.verdict, waiting.tasks) == ("later", [0, 2])
    assert await verdict(0, 2, "other", "second") == "other"
    assert await verdict(0, 0, "other", "second", "other") == "other"
    assert await verdict(0, 1, "b", "second") == "later"
    # A task that is done is known by its keys; one that was begun, by all of its rows.
    assert await verdict(0, 0, "other values", "second", "k") == "done"
    assert (await sinks.claim(claim(0, 1, "b", "second"))).tasks == [2]
    assert await verdict(0, 2, "c", "second") == "write"
    assert await verdict(0, 1, "b", "second") == "write"
    assert await verdict(0, 1, "x", "second") == "other"
    await finish(sinks, 0, 1)
    await sinks.commit(Commit("out", "app", 0))
    assert await verdict(0, 3, "d", "third") == "other"
    assert await verdict(0, 1, "b", "third") == "done"
    assert await verdict(0, 2, "c", "third") == "done"  # the batch is
    assert await verdict(1, 0, "e", "third") == "write"
    behind = await sinks.claim(claim(0, 3, "d", "third"))
    assert (behind.verdict, behind.newest) == ("behind", 1)
    assert await verdict(0, 0, "a", "copy", "k") == "done"
    for batch in range(2, 9):
        assert await verdict(batch, 0, "e", "third") == "write"
    assert await verdict(1, 0, "e", "copy") == "behind"  # longer ago than is remembered
    await sinks.commit(Commit("out", "nobody", 3))
    assert (await sinks.claim(Claim("out", "plan", 0, 0, "p", "r", "how far"))).note == "how far"
    assert (await sinks.claim(Claim("out", "plan", 0, 0, "p", "s", "farther"))).note == "how far"
    assert (await sinks.claim(Claim("elsewhere", "app", 0, 0, "z", "r"))).verdict == "write"


def sinks_in(directory: Path, pool: ThreadPoolExecutor, **more: Any) -> WriteClaims:
    return WriteClaims(directory, pool=pool, expiry=60, **more)


async def begun(queues: Any, app: str, batch: int, task: int) -> bool:
    sql = "SELECT 1 FROM sink_tasks WHERE app = $1 AND batch = $2 AND task = $3"
    return bool(await queues.database.fetch(sql, app, batch, task))


async def test_topics_and_queues_keep_the_same_rules(tmp_path: Path, database_url: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        await check_rules(sinks_in(tmp_path, pool))
    async with running(database_url) as queues:
        await check_rules(queues.sinks)
        chance = random.Random(7)
        with ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as scratch:
            files = sinks_in(Path(scratch), pool)
            for step in range(300):
                asked = claim(
                    chance.randrange(4),
                    chance.randrange(3),
                    chance.choice("ab"),
                    chance.choice("rs"),
                    chance.choice("kl"),
                )
                asked.app = f"random-{step // 60}"
                if chance.random() < 0.3:
                    task = chance.randrange(3)
                    if await begun(queues, asked.app, asked.batch, task):
                        await finish(files, asked.batch, task, asked.app)
                        await finish(queues.sinks, asked.batch, task, asked.app)
                if chance.random() < 0.1:
                    done = Commit("out", asked.app, asked.batch)
                    await files.commit(done)
                    await queues.sinks.commit(done)
                if chance.random() < 0.1:  # a restart forgets nothing
                    files = sinks_in(Path(scratch), pool)
                    await files.start()
                stored = await queues.sinks.claim(asked)
                stored.rows = 0  # topics do not know
                assert await files.claim(asked) == stored, (step, asked)


async def test_a_queue_that_was_deleted_takes_its_claims_along(database_url: str) -> None:
    async with running(database_url) as queues:
        assert (await queues.sinks.claim(claim(0, 0, "a", "r"))).verdict == "write"
        await queues.admin.configure("out")
        assert (await queues.sinks.claim(claim(0, 0, "b", "r"))).verdict == "other"
        await queues.admin.delete("out")
        await queues.admin.configure("out")
        assert (await queues.sinks.claim(claim(0, 0, "b", "r"))).verdict == "write"
        await queues.database.fetch("UPDATE sink_tasks SET claimed_at = now() - interval '31 days'")
        await forget_idle_sinks(queues.database, 30 * 86400.0)
        assert not await queues.database.fetch("SELECT 1 FROM sink_tasks")


async def test_the_journal_of_claims_survives_damage_and_stays_small(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("penstock.topics.write_claims.SNAPSHOT_BYTES", 1000)
    now = [1000.0]

    with ThreadPoolExecutor(1) as pool:
        sinks = sinks_in(tmp_path, pool, clock=lambda: now[0])
        await sinks.claim(Claim("out", "old", 0, 0, "a", "r"))
        now[0] += 100
        for batch in range(200):
            await sinks.claim(claim(batch, 0, "a", "r"))
        assert (tmp_path / JOURNAL).stat().st_size < 8 * 1200
        with (tmp_path / JOURNAL).open("ab") as file:
            file.write(b"torn")
        sinks = sinks_in(tmp_path, pool, clock=lambda: now[0])
        await sinks.start()
        assert (await sinks.claim(claim(199, 0, "b", "r"))).verdict == "other"
        assert (await sinks.claim(claim(200, 0, "b", "r"))).verdict == "write"
        assert b"torn" not in (tmp_path / JOURNAL).read_bytes()
        assert (
            await sinks.claim(Claim("out", "old", 0, 0, "b", "r"))
        ).verdict == "write"  # it had expired
        sinks.forget("out")
        assert (await sinks.claim(claim(0, 0, "new", "r"))).verdict == "write"


async def test_the_claims_on_a_deleted_topic_do_not_come_back_with_a_restart(
    tmp_path: Path,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        sinks = sinks_in(tmp_path, pool)
        await sinks.claim(claim(0, 0, "a", "r"))
        await finish(sinks, 0, 0)
        sinks.forget("out")
        await sinks.stop()
        sinks = sinks_in(tmp_path, pool)
        await sinks.start()
        assert (await sinks.claim(claim(0, 0, "a", "r"))).verdict == "write"


async def test_a_claim_whose_caller_is_cancelled_leaves_the_journal_whole(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        busy = threading.Event()
        pool.submit(busy.wait)  # the write of the journal waits in the pool
        sinks = sinks_in(tmp_path, pool)
        asking = asyncio.create_task(sinks.claim(claim(0, 0, "a", "first")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asking.cancel()
        busy.set()
        second = await sinks.claim(claim(0, 0, "b", "second"))
        assert second.verdict == "other"  # the first claim was recorded, and before this one
        await sinks.stop()
        _, damaged = events((tmp_path / JOURNAL).read_bytes(), FIELDS)
        assert damaged == 0


def rows(values: list[bytes | None], *cuts: int) -> list[pa.RecordBatch]:
    whole = pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], ["payload"])
    ends = [*cuts, len(values)]
    return [whole.slice(a, b - a) for a, b in zip([0, *cuts], ends, strict=True)]


def checksum(batches: list[pa.RecordBatch]) -> str:
    result = Checksum(["payload"])
    for batch in batches:
        result.add(batch)
    return result.of(sum(batch.num_rows for batch in batches))


def test_a_checksum_depends_on_the_rows_alone(monkeypatch) -> None:
    values = [b"ab", b"", None, b"c", b"ab"]
    expected = checksum(rows(values))
    assert checksum(rows(values, 1, 3)) == expected
    assert checksum(rows(values, 2)) == expected
    others = [
        [b"ab", None, b"", b"c", b"ab"],
        [b"a", b"b", b"", None, b"c", b"ab"],
        [b"ab", b"", None, b"cab", b""],
        values[:-1],
    ]
    assert expected not in map(checksum, map(rows, others))
    monkeypatch.setattr(held_rows, "HELD_BYTES", 20)
    with closing(Held()) as held:
        kept = list(held.keep(rows(values * 10, 5, 20, 30)))
        assert checksum(kept) == checksum(rows(values * 10))
        for _ in range(2):
            read = [value for batch in held for value in batch["payload"].to_pylist()]
            assert read == values * 10
        assert np.all([batch.num_rows for batch in held])
        assert held.rows == 50


@pytest.mark.parametrize("spilled", [False, True])
def test_a_batch_that_release_0_2_0_began_is_still_recognised(
    server, tcp, monkeypatch, spilled
) -> None:
    """Its claims have other checksums."""
    if spilled:
        monkeypatch.setattr(held_rows, "HELD_BYTES", 20)
    tag = uuid.uuid4().hex[:8]
    local = {"streaming.sql.batchId": "3", "sql.streaming.queryId": "0123456789abcdef"}
    task = SimpleNamespace(getLocalProperty=local.get, partitionId=lambda: 0)
    monkeypatch.setattr(identity.TaskContext, "get", lambda: task)
    values = [b"ab", b"", b"c"] * 10
    given = TopicSinkOptions(topic=f"old-{tag}", broker=tcp, app_id="app")
    schema = StructType().add("payload", BinaryType())

    def write(*new: bytes) -> None:
        sink = TopicWriter(given, schema)
        sink.commit([sink.write(iter(rows([*values, *new], 5, 20)))])

    old = Checksum(["payload"], held_rows.EARLIER)
    for batch in rows(values):
        old.add(batch)
    with TopicLink(tcp, 20) as link:
        place = (f"old-{tag}", "app:0123456789abc", 3, 0)
        link.claim(Claim(*place, old.of(30), "an earlier run"))
        with pytest.raises(Conflict, match="before with other rows"):
            write(b"more")
        for _ in range(2):
            write()
            assert link.info(f"old-{tag}").next_offset == 30


def test_the_checksum_of_keys_takes_any_type() -> None:
    moments = [datetime(2026, 1, 1, tzinfo=UTC), None]
    table = pa.table(
        {"at": moments, "n": [1.5, None], "tags": [["a"], None], "by": [{"a": 1}, None]}
    )
    sums = [Checksum(table.column_names) for _ in range(3)]
    for batch in table.to_batches():
        sums[0].add(batch)
        for row in range(2):
            sums[1].add(batch.slice(row, 1))
        sums[2].add(batch.take(pa.array([1, 0])))
    assert sums[0].of(2) == sums[1].of(2) != sums[2].of(2)


async def test_a_push_of_a_task_stores_each_row_once_even_if_its_message_is_gone(
    database_url: str,
) -> None:
    async with running(database_url) as queues:
        place = Commit("out", "app", 0, 0)
        items = [Item("out", b"%d" % i, f"p{i % 2}", f"app:{i}") for i in range(10)]
        await queues.sinks.claim(claim(0, 0, "a", "r"))
        with pytest.raises(Conflict, match="has not stored the rows before these"):
            await queues.sinks.push(place, 4, items[4:], last=True)
        assert await queues.sinks.push(place, 0, items[:4], last=False) == 4
        await queues.admin.clear("out")
        # The broker answered and the sink was killed before it heard: it starts again.
        assert (await queues.sinks.claim(claim(0, 0, "a", "s"))).rows == 4
        assert await queues.sinks.push(place, 0, items[:4], last=False) == 4
        assert await queues.sinks.push(place, 2, items[2:7], last=False) == 7
        assert await queues.sinks.push(place, 7, items[7:], last=True) == 10
        assert await queues.sinks.push(place, 7, items[7:], last=True) == 10
        assert (await queues.sinks.claim(claim(0, 0, "a", "t"))).verdict == "done"
        rows = await queues.database.fetch("SELECT payload FROM messages ORDER BY payload")
        assert [row["payload"] for row in rows] == [b"%d" % i for i in range(4, 10)]


async def test_a_task_fills_a_queue_up_and_goes_on_when_there_is_room(database_url: str) -> None:
    async with running(database_url) as queues:
        await queues.admin.configure("out", QueueOptions(max_size=5))
        place = Commit("out", "app", 0, 0)
        items = [Item("out", b"%d" % i, f"p{i % 3}", f"app:{i}") for i in range(8)]
        await queues.sinks.claim(claim(0, 0, "a", "r"))
        stored = await queues.sinks.push(place, 0, items, last=True)
        assert stored == 4  # the first half of them
        assert await queues.sinks.push(place, 4, items[4:], last=True) == 5
        with pytest.raises(Full, match="queue 'out' is full"):
            await queues.sinks.push(place, 5, items[5:], last=True)
        await queues.admin.clear("out")
        assert await queues.sinks.push(place, 5, items[5:], last=True) == 8
        assert (await queues.sinks.claim(claim(0, 0, "a", "s"))).verdict == "done"


@pytest.mark.parametrize("verdict", ["other", "behind"])
def test_a_rejection_says_what_happened_and_how_to_go_on(verdict: Any) -> None:
    text = str(rejection(claim(3, 1, "a", "r"), Claimed(verdict, 7)))
    assert "batch 3 of 'app'" in text
    if verdict == "behind":
        assert "behind batch 7" in text
        assert "copied or restored" in text
    else:
        assert "(task 1), in full or in part. Nothing of it was written now." in text
        assert "Run the batch with the steps it was begun with" in text
        assert "DECIMAL" in text
        assert "writes all rows of this batch once more" in text


def test_a_task_claims_and_writes_over_the_wire(broker, server) -> None:
    queue = f"wire-{uuid.uuid4().hex[:8]}"
    with TopicLink(broker.address, 5) as topics, PushLink(server.url, None, 5) as queues:
        for link in (topics, queues):
            asked = Claim(queue, "app", 3, 0, "all", "run")
            assert link.claim(asked).verdict == "write"
            if link is topics:
                topics.commit_sink(Commit(queue, "app", 3, 0))
            else:
                item = b'{"queue":"%s","payload":1}' % queue.encode()
                queues.push_rows(asked, 0, [item] * 3, last=False)
                assert queues.claim(asked).rows == 3
                queues.push_rows(asked, 2, [item] * 2, last=True)
                assert queues.claim(asked).rows == 4
            assert link.claim(asked).verdict == "done"
            link.commit_sink(Commit(queue, "app", 3))
            assert link.claim(Claim(queue, "app", 3, 1, "more", "run")).verdict == "other"


def test_a_large_task_waits_while_others_come_and_then_says_what_it_needs(monkeypatch) -> None:
    class Broker:
        def __init__(self, *answers: Claimed) -> None:
            self._answers = list(answers)

        def claim(self, _: Claim) -> Claimed:
            return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    asked = claim(0, 0, "a", "r")
    first, second = Claimed("later", tasks=[3, 4]), Claimed("later", tasks=[4])
    monkeypatch.setattr(identity, "POLL_SECONDS", 0.01)
    assert wait_for_turn(Broker(first, second, Claimed("write")), asked).verdict == "write"
    monkeypatch.setattr(identity, "WAIT_SECONDS", 0.05)
    with pytest.raises(Unavailable, match=r"tasks \[4\] have not run again.*as many cores as"):
        wait_for_turn(Broker(first, second), asked)
