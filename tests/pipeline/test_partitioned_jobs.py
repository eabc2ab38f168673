"""The jobs archive, replay and compact over every partition of a topic."""

import uuid
from pathlib import Path
from typing import Any

import pytest

from penstock import pipeline
from penstock.client import SyncClient
from penstock.errors import InvalidRequest
from penstock.pipeline.jobs.archive import Archiver, Origin, archive, read_archive
from penstock.pipeline.jobs.archive_watch import ArchiveWatch
from penstock.pipeline.jobs.compact import CompactOptions, compact, read_compacted
from penstock.pipeline.jobs.replay import ReplayOptions, replay
from penstock.pipeline.lake.table import archived_partitions
from tests.pipeline.support import batch_rows
from tests.support.api import call

pytestmark = pytest.mark.spark


class Partitioned:
    """A topic with four partitions; the first and the last one are empty."""

    def __init__(self, server: Any, tcp: str) -> None:
        self.url, self.tcp = server.url, tcp
        self.name = f"t{uuid.uuid4().hex[:8]}"
        with SyncClient(topics=tcp) as client:
            client.topic(self.name).create(format="kafka", partitions=4)

    def produce(self, round_: int) -> None:
        """A record of each of two keys to partitions 1 and 2, and of one more key to partition 2."""
        with SyncClient(topics=self.tcp) as client:
            for partition, keys in enumerate((("a", "b"), ("c", "d", "e")), 1):
                for key in keys:
                    payload = f'{{"id": "{key}", "n": {round_}}}'.encode()
                    client.topic(self.name).produce(payload, partition=partition)

    def origin(self) -> Origin:
        return Origin(topic=self.name, broker=self.tcp, url=self.url)


@pytest.fixture
def topic(server: Any, tcp: str) -> Partitioned:
    return Partitioned(server, tcp)


def test_every_partition_is_archived_once_and_read_together(
    spark: Any, topic: Partitioned, tmp_path: Path
) -> None:
    lake = str(tmp_path / "lake")
    watch = ArchiveWatch(Archiver(lake, topic.origin()), 60.0, [])
    topic.produce(0)
    assert watch.behind() == 5
    assert archive(spark, lake, topic.origin()).rows == 5
    assert archive(spark, lake, topic.origin()).rows == 0
    assert watch.behind() == 0
    expected = {*((1, i) for i in range(2)), *((2, i) for i in range(3))}
    rows = read_archive(spark, lake, topic=topic.name).collect()
    assert len(rows) == 5
    assert {(row.partition, row.offset) for row in rows} == expected
    assert {row.topic for row in rows} == {topic.name}
    assert call(f"{topic.url}/topics/{topic.name}%2F2")["archived_offset"] == 3
    topic.produce(1)
    whole = pipeline.table(spark, topic.name, lake, broker=topic.tcp).collect()
    assert len(whole) == 10
    assert {(row.partition, row.offset) for row in whole} == {
        *((1, i) for i in range(4)),
        *((2, i) for i in range(6)),
    }
    read = batch_rows(broker=topic.tcp, topic=topic.name, archive=lake)
    assert len(read) == 10


def test_every_partition_is_replayed_once(spark: Any, topic: Partitioned, tmp_path: Path) -> None:
    topic.produce(0)
    lake = str(tmp_path / "lake")
    archive(spark, lake, topic.origin())
    for number, source in enumerate(({}, {"archive": lake})):
        target = f"{topic.name}-{number}"
        options = ReplayOptions(
            topic.name, "fix", to_topic=target, broker=topic.tcp, execute=True, **source
        )
        for _ in range(number + 1):  # what is done is not written again
            assert replay(spark, options).rows == 5
        texts = sorted(
            row["payload"].decode() for row in batch_rows(broker=topic.tcp, topic=target)
        )
        assert texts == [f'{{"id": "{key}", "n": 0}}' for key in "abcde"]
    some = ReplayOptions(topic.name, "some", to_topic="x", broker=topic.tcp, start=1)
    with pytest.raises(InvalidRequest, match=f"4 partitions.*{topic.name}/1"):
        replay(spark, some)


@pytest.mark.parametrize("to", ["topic", "parquet"])
def test_every_partition_is_compacted(
    spark: Any, topic: Partitioned, tmp_path: Path, to: str
) -> None:
    target = f"{topic.name}-latest"
    where = {"to_topic": target} if to == "topic" else {"to": str(tmp_path / "latest")}
    options = CompactOptions(topic.name, key="$.id", broker=topic.tcp, url=topic.url, **where)
    topic.produce(0)
    topic.produce(1)
    done = compact(spark, options)
    assert (done.records_before, done.records) == (10, 5)
    if to == "topic":
        rows = batch_rows(broker=topic.tcp, topic=target)
        texts = [row["payload"].decode() for row in rows]
    else:
        frame = read_compacted(spark, options.to, topic.name)
        texts = [bytes(row.payload).decode() for row in frame.collect()]
    assert sorted(texts) == [f'{{"id": "{key}", "n": 1}}' for key in "abcde"]


def test_partitions_are_listed_in_an_object_store(
    spark: Any, topic: Partitioned, bucket: str
) -> None:
    topic.produce(0)
    archive(spark, bucket, topic.origin())
    assert archived_partitions(bucket, topic.name) == [f"{topic.name}/1", f"{topic.name}/2"]
