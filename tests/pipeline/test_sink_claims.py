"""What a sink's identity promises: the same content, or nothing; in topics' files and in PostgreSQL
alike.
"""

import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import Conflict, Unavailable
from penstock.net.topic_link import TopicLink
from penstock.pipeline.sinks import identity
from penstock.pipeline.sinks.identity import Held, Writer, claimed, wait_for_turn
from penstock.pipeline.sinks.queue import PushLink
from penstock.protocol.sink_claims import Claim, Claimed, Commit
from penstock.topics.write_claims import JOURNAL, WriteClaims
from tests.queues.support import running


def claim(
    batch: int, task: int, checksum: str, run: str, note: str = "", target: str = "out"
) -> Claim:
    return Claim(target, "app", batch, task, checksum, run, note)


async def check_rules(sinks: Any) -> None:
    async def verdict(*place: Any) -> str:
        return (await sinks.claim(claim(*place))).verdict

    assert await verdict(0, 0, "a", "first") == "write"
    assert await verdict(0, 2, "c", "first") == "write"
    assert await verdict(0, 0, "a", "first") == "write"  # a task that is tried again
    # The batch is run again: a task that has no place waits until those that have one came with
    # what they had.
    waiting = await sinks.claim(claim(0, 1, "b", "second"))
    assert (waiting.verdict, waiting.tasks) == ("wait", [0, 2])
    assert await verdict(0, 0, "other", "second") == "other"
    assert await verdict(0, 1, "b", "second") == "wait"
    assert await verdict(0, 0, "a", "second") == "write"
    assert (await sinks.claim(claim(0, 1, "b", "second"))).tasks == [2]
    assert await verdict(0, 2, "c", "second") == "write"
    assert await verdict(0, 1, "b", "second") == "write"
    assert await verdict(0, 1, "x", "second") == "other"
    await sinks.commit(Commit("out", "app", 0))
    assert await verdict(0, 3, "d", "third") == "complete"
    assert await verdict(0, 1, "b", "third") == "write"
    assert await verdict(1, 0, "e", "third") == "write"
    behind = await sinks.claim(claim(0, 3, "d", "third"))
    assert (behind.verdict, behind.newest) == ("behind", 1)
    assert (
        await verdict(0, 0, "a", "copy") == "write"
    )  # the same rows: they are there, nothing is added
    for batch in range(2, 9):
        assert await verdict(batch, 0, "e", "third") == "write"
    assert await verdict(1, 0, "e", "copy") == "behind"  # longer ago than is remembered
    await sinks.commit(Commit("out", "nobody", 3))
    assert (await sinks.claim(Claim("out", "plan", 0, 0, "p", "r", "how far"))).note == "how far"
    assert (await sinks.claim(Claim("out", "plan", 0, 0, "p", "s", "farther"))).note == "how far"
    assert (await sinks.claim(Claim("elsewhere", "app", 0, 0, "z", "r"))).verdict == "write"


def sinks_in(directory: Path, pool: ThreadPoolExecutor, **more: Any) -> WriteClaims:
    return WriteClaims(directory, pool=pool, expiry=60, **more)


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
                )
                asked.app = f"random-{step // 60}"
                if chance.random() < 0.1:
                    done = Commit("out", asked.app, asked.batch)
                    await files.commit(done)
                    await queues.sinks.commit(done)
                if chance.random() < 0.1:  # a restart forgets nothing
                    files = sinks_in(Path(scratch), pool)
                    await files.start()
                assert await files.claim(asked) == await queues.sinks.claim(asked), (
                    step,
                    asked,
                )


async def test_a_queue_that_was_deleted_takes_its_claims_along(database_url: str) -> None:
    async with running(database_url) as queues:
        assert (await queues.sinks.claim(claim(0, 0, "a", "r"))).verdict == "write"
        await queues.admin.configure("out")
        assert (await queues.sinks.claim(claim(0, 0, "b", "r"))).verdict == "other"
        await queues.admin.delete("out")
        await queues.admin.configure("out")
        assert (await queues.sinks.claim(claim(0, 0, "b", "r"))).verdict == "write"
        await queues.database.fetch("UPDATE sink_tasks SET claimed_at = now() - interval '31 days'")
        await queues.sinks.forget_old()
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


def rows(values: list[bytes | None], *cuts: int) -> list[pa.RecordBatch]:
    whole = pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], ["payload"])
    ends = [*cuts, len(values)]
    return [whole.slice(a, b - a) for a, b in zip([0, *cuts], ends, strict=True)]


def checksum(batches: list[pa.RecordBatch]) -> str:
    with closing(Held(["payload"])) as held:
        for batch in batches:
            held.add(batch)
        return held.checksum


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
    monkeypatch.setattr(identity, "HELD_BYTES", 20)
    with closing(Held(["payload"])) as held:
        for batch in rows(values * 10, 5, 20, 30):
            held.add(batch)
        assert held.checksum == checksum(rows(values * 10))
        assert [value for batch in held for value in batch["payload"].to_pylist()] == values * 10
        assert np.all([batch.num_rows for batch in held])


@pytest.mark.parametrize("kind", ["topic", "queue"])
def test_rows_are_claimed_over_the_wire_before_they_are_given_on(kind, broker, server) -> None:
    keeper = TopicLink(broker.address, 5) if kind == "topic" else PushLink(server.url, None, 5)

    def write(values: list[bytes | None], run: str, task: int = 0) -> int:
        batches = claimed(
            iter(rows(values)), ["payload"], "claimed", run, Writer("app", 3, task), keeper
        )
        return sum(batch.num_rows for batch in batches)

    assert write([b"a", b"b"], "r1") == 2
    assert write([], "r1", task=5) == 0
    assert write([b"a", b"b"], "r2") == 2
    with pytest.raises(
        Conflict, match=r"batch 3 of 'app' was written to claimed before with other rows.*new appId"
    ):
        write([b"a", b"c"], "r2")
    keeper.commit_sink(Commit("claimed", "app", 3))
    with pytest.raises(Conflict, match="other rows"):
        write([b"more"], "r2", task=1)
    keeper.close()


def test_a_task_waits_for_those_of_an_earlier_run_and_says_if_they_never_come(monkeypatch) -> None:
    answers = [Claimed("wait", tasks=[4]), Claimed("wait", tasks=[4]), Claimed("write")]
    assert wait_for_turn(lambda _: answers.pop(0), claim(0, 0, "a", "r")).verdict == "write"
    monkeypatch.setattr(identity, "WAIT_SECONDS", 0.05)
    with pytest.raises(
        Unavailable, match=r"tasks \[4\] have not come again.*as many cores as before"
    ):
        wait_for_turn(lambda _: Claimed("wait", tasks=[4]), claim(0, 0, "a", "r"))
    with pytest.raises(Conflict, match=r"behind batch 7.*copied or restored"):
        wait_for_turn(lambda _: Claimed("behind", 7), claim(0, 0, "a", "r"))
