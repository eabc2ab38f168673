"""The built-in jobs: archive, replay, recover."""

import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from penstock import pipeline
from penstock.errors import InvalidRequest, NotFound
from penstock.net.broker_caller import BrokerCaller
from penstock.net.topic_link import TopicLink
from penstock.pipeline.jobs.archive import (
    Archiver,
    Origin,
    Payloads,
    archive,
    queue_steps,
    read_archive,
)
from penstock.pipeline.jobs.archive_directory import DirectoryEntry, Lake, Manifest
from penstock.pipeline.jobs.archive_watch import ArchiveWatch
from penstock.pipeline.jobs.recover import find_files, recover
from penstock.pipeline.jobs.replay import ReplayOptions, replay
from penstock.pipeline.lake import maintenance
from penstock.pipeline.lake.table import LakeTable
from penstock.pipeline.sinks.queue import PushLink
from penstock.pipeline.sources.topic import DataLoss
from penstock.protocol import frames
from penstock.queues.types import Item
from tests.pipeline.support import batch_rows


def test_only_files_of_the_manifest_count_and_strays_are_removed(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    manifest = Manifest(
        "topic",
        "a/b c",
        {"next": 3},
        [DirectoryEntry("topic=a%2Fb%20c/date=2026-01-01/x-0.parquet", 3, 9, 0, 2)],
    )
    folder = tmp_path / "topic=a%2Fb%20c" / "date=2026-01-01"
    folder.mkdir(parents=True)
    (folder / "x-0.parquet").write_bytes(b"")
    (folder / "stray.parquet").write_bytes(b"")
    lake.replace(manifest)
    assert lake.manifest("topic", "a/b c") == manifest
    assert lake.names() == [("topic", "a/b c")]
    assert lake.remove_strays(manifest) == 1
    assert [path.name for path in folder.iterdir()] == ["x-0.parquet"]
    with pytest.raises(NotFound, match="does not contain topic 'other'; it has topic a/b c"):
        lake.require("topic", "other")


def offsets(spark: Any, target: Path, topic: str) -> list[int]:
    return sorted(row.offset for row in read_archive(spark, str(target), topic=topic).collect())


@pytest.mark.spark
def test_a_topic_is_archived_once_whatever_is_killed_when_and_replayed_from_there(
    server, tcp, spark, tmp_path, monkeypatch
) -> None:
    topic, target = f"logs-{uuid.uuid4().hex[:8]}", tmp_path / "lake"
    origin = Origin(topic=topic, broker=tcp, url=server.url)
    with TopicLink(tcp, 20) as link:
        link.append(frames.produce_batch(topic, [b"%d" % i for i in range(50)]))
        assert archive(spark, str(target), origin).rows == 50
        link.append(frames.produce_batch(topic, [b"%d" % i for i in range(50, 80)]))

    def killed(*_: Any, **how: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LakeTable, "_commit", killed)  # dies with its files in place
        with pytest.raises(KeyboardInterrupt):
            archive(spark, str(target), origin)
    assert offsets(spark, target, topic) == list(range(50))
    monkeypatch.setattr(maintenance, "MERGED_FILES", 2)
    done = archive(spark, str(target), origin)
    assert (done.rows, done.maintained.merged) == (30, 2)
    assert offsets(spark, target, topic) == list(range(80))
    done = archive(spark, str(target), origin)
    assert (done.rows, done.files, done.position) == (0, 1, 80)
    described = json.loads(_get(f"{server.url}/topics/{topic}"))
    assert described["archived_offset"] == 80

    copy = f"copy-{topic}"
    plan = {
        "topic": topic,
        "id": "r1",
        "to_topic": copy,
        "archive": str(target),
        "broker": tcp,
        "where": "offset % 2 = 0",
    }
    dry = replay(spark, ReplayOptions(**plan))
    assert (dry.rows, dry.first, dry.last, dry.executed) == (40, 0, 78, False)
    for _ in range(2):  # the second run with the same id adds nothing
        assert replay(spark, ReplayOptions(**plan, execute=True)).rows == 40
    assert [int(row["payload"]) for row in batch_rows(broker=tcp, topic=copy)] == list(
        range(0, 80, 2)
    )
    with pytest.raises(InvalidRequest, match="into itself"):
        replay(spark, ReplayOptions(topic=topic, id="x", to_topic=topic, broker=tcp))
    again = ReplayOptions(topic=topic, id="x", to_topic=topic, broker=tcp, end=3, execute=True)
    for _ in range(2):
        assert replay(spark, again).rows == 3
    payloads = [int(row["payload"]) for row in batch_rows(broker=tcp, topic=topic)]
    assert payloads == [*range(80), *range(3)]


@pytest.mark.spark
def test_a_queue_is_archived_once_whatever_is_killed_when(
    server, spark, tmp_path, monkeypatch
) -> None:
    queue, target = f"paid-{uuid.uuid4().hex[:8]}", str(tmp_path / "lake")
    origin = Origin(queue=queue, database=server.database_url)
    link = PushLink(server.url, None, 30)

    def push(numbers: range) -> None:
        items = [{"queue": queue, "partition": f"p{i % 3}", "payload": i} for i in numbers]
        link.push([json.dumps(item).encode() for item in items], repeatable=False)

    def archived() -> list[tuple[str, int, int]]:
        rows = read_archive(spark, target, queue=queue).collect()
        return sorted((row.partition, row.seq, int(row.payload)) for row in rows)

    def expected(count: int) -> list[tuple[str, int, int]]:
        return sorted((f"p{i % 3}", i // 3 + 1, i) for i in range(count))

    with BrokerCaller(server.url) as caller:
        options = {"recordDeliveries": True, "retryDelay": 0}
        caller.json("POST", "/api/v1/configure", {"queue": queue, "options": options})
    push(range(30))
    assert archive(spark, target, origin).rows == 30
    push(range(30, 48))

    def killed(*_: Any, **how: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LakeTable, "_commit", killed)
        with pytest.raises(KeyboardInterrupt):
            archive(spark, target, origin)
    assert archived() == expected(30)
    push(range(48, 60))
    done = archive(spark, target, origin)
    assert done.rows == 30
    assert archived() == expected(60)
    assert archive(spark, target, origin).rows == 0
    push(range(60, 63))
    watch = ArchiveWatch(Archiver(target, origin), 60.0, [])
    assert watch.behind() == 3
    whole = pipeline.queue_table(spark, queue, target, database=server.database_url)
    assert sorted(int(row.payload) for row in whole.collect()) == list(range(63))
    assert not list(queue_steps(origin.options(), None, 60.0)), "none is an hour old"
    with BrokerCaller(server.url) as caller:
        pop = f"/api/v1/pop/queue/{queue}/partition/p0?consumerGroup=g&batch=3&subscriptionMode=all"
        for statuses in (("completed", "dlq", "failed"), ("completed", "retry")):
            acks = [
                {name: one[name] for name in ("transactionId", "partitionId", "leaseId")}
                | {"status": status, "error": "no stock"}
                for one, status in zip(caller.json("GET", pop)["messages"], statuses, strict=False)
            ]
            answers = {"acknowledgments": acks, "consumerGroup": "g"}
            caller.json("POST", "/api/v1/ack/batch", answers)
    other = f"{target}-outcomes"
    archive(spark, other, origin, payloads=Payloads(outcome_minutes=0.0))
    rows = read_archive(spark, other, queue=queue).where("partition = 'p0' AND seq < 6").collect()
    (p0,) = {row.partition for row in rows}
    outcomes = {row.seq: row._outcomes[0] for row in rows}
    assert p0 == "p0"
    assert [(o.outcome, o.attempts, o.error) for _, o in sorted(outcomes.items())] == [
        *(("completed", 1, None), ("dead", 1, "no stock"), ("completed", 2, None)),
        *(("waiting", 1, None), ("leased", None, None)),
    ]
    assert all((outcomes[seq].latencyMs or -1) >= 0 for seq in (1, 2, 3))
    assert (outcomes[4].latencyMs, outcomes[5].latencyMs) == (None, None)
    other = replace(LakeTable(target, "queue", queue).require(), identity="1:0")
    with pytest.raises(DataLoss, match="belongs to another database"):
        list(queue_steps(origin.options(), other))


@pytest.mark.spark
def test_buffer_files_of_two_brokers_are_recovered_once_in_order(server, spark, tmp_path) -> None:
    from penstock.buffer.events import encode
    from penstock.pipeline.sources.queue import QueueReader
    from tests.pipeline.test_queue_source import options, rows_of

    queue = f"rec-{uuid.uuid4().hex[:8]}"
    alice = {1: "alice"}
    lines = encode(
        [
            Item(queue, b"%d" % i, f"p{i % 2}", f"t{i}", producer=alice.get(i % 2))
            for i in range(100)
        ]
    )
    a, b = tmp_path / "a", tmp_path / "b" / "failed"
    a.mkdir()
    b.mkdir(parents=True)
    (a / "failover_0001.buf").write_bytes(b"".join(lines[:40]))
    (b / "failover_0002.buf").write_bytes(b"".join(lines[30:70]))  # ten events were written twice
    (a / "qos0_0003.buf.tmp").write_bytes(b"".join(lines[70:]) + b'{"queue":"torn')
    (a / "ignored.txt").write_text("x")
    assert [path.name for path in find_files([str(tmp_path)])] == [
        *("failover_0001.buf", "failover_0002.buf", "qos0_0003.buf.tmp"),
    ]
    dry = recover(spark, [str(tmp_path)], server.url, tasks=2, dry_run=True)
    assert (dry.files, dry.events, dry.duplicate, dry.unreadable) == (3, 110, 10, 1)
    done = recover(spark, [str(tmp_path)], server.url, tasks=2)
    assert (done.inserted, done.duplicate, done.rejected) == (100, 10, [])
    again = recover(spark, [str(tmp_path)], server.url, tasks=2)
    assert (again.inserted, again.duplicate) == (0, 110)
    reader = QueueReader(options(server.database_url, queue, streaming=False))
    rows = sorted(
        rows_of(reader, reader.partitions()), key=lambda row: (row["partition"], row["seq"])
    )
    assert [int(row["payload"]) for row in rows] == [*range(0, 100, 2), *range(1, 100, 2)]
    popped = json.loads(_get(f"{server.url}/api/v1/pop/queue/{queue}?batch=100&partitions=2"))[
        "messages"
    ]
    assert {message["producerSub"] for message in popped if message["data"] % 2} == {"alice"}
    assert {message["producerSub"] for message in popped if message["data"] % 2 == 0} == {None}


def test_a_task_of_recover_pushes_nothing_after_a_push_that_failed(monkeypatch) -> None:
    from penstock.errors import Unavailable
    from penstock.pipeline.jobs import recover as job
    from penstock.pipeline.sinks.queue import PushCounts

    class Link:
        pushed: ClassVar[list[list[bytes]]] = []

        def push(self, items: list[bytes], *, repeatable: bool) -> PushCounts:
            assert repeatable
            if b"2\n" in items:
                raise Unavailable("the broker is away")
            self.pushed.append(items)
            return PushCounts(queued=len(items))

        def close(self) -> None:
            pass

    monkeypatch.setattr(job, "PUSH_EVENTS", 1)
    monkeypatch.setattr(job, "PushLink", lambda *_: Link())
    rows = [("q", "p", 0, number, 1, b"%d\n" % number, 0) for number in range(5)]
    pieces = pa.RecordBatch.from_pylist(
        [dict(zip(job.PIECES.names, row, strict=True)) for row in rows], schema=job.PIECES
    )
    with pytest.raises(Unavailable, match="the broker is away"):
        list(job._pusher("http://broker", None, 1.0)(iter([pieces])))
    assert Link.pushed == [[b"0\n"], [b"1\n"]]


def _get(url: str) -> bytes:
    import urllib.request

    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()


@pytest.mark.spark
def test_buffer_files_of_queen_are_recovered_once_in_order(server, spark, tmp_path) -> None:
    queue = f"rec-{uuid.uuid4().hex[:8]}"

    def event(number: int) -> bytes:
        return b'{"payload":%d,"queue":"%b","transactionId":"t%d"}' % (
            number,
            queue.encode(),
            number,
        )

    def frame(number: int) -> bytes:
        return len(event(number)).to_bytes(4, "little") + event(number)

    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "failover_2024-01-15T10:30:00.buf").write_bytes(frame(0))
    (tmp_path / "failover_processing.buf").write_bytes(frame(1) + frame(2))
    (tmp_path / "failover.buf").write_bytes(frame(3) + frame(4)[:-2])
    bare = b'{"payload":5,"queue":"%b"}\n' % queue.encode()
    (tmp_path / "failover_019a0c11-7fe8.buf").write_bytes(event(4) + b"\n" + bare)
    dry = recover(spark, [str(tmp_path)], server.url, tasks=2, dry_run=True)
    assert (dry.files, dry.events, dry.duplicate, dry.unreadable) == (4, 6, 0, 1)
    done = recover(spark, [str(tmp_path)], server.url, tasks=2)
    assert (done.inserted, done.duplicate, done.unreadable, done.rejected) == (6, 0, 1, [])
    again = recover(spark, [str(tmp_path)], server.url, tasks=2)
    assert (again.inserted, again.duplicate) == (0, 6)
    url = f"{server.url}/api/v1/pop/queue/{queue}?batch=100"
    assert [message["data"] for message in json.loads(_get(url))["messages"]] == list(range(6))
