"""Record batches and partitions as Spark reads them: over a broker and from its files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.client import SyncClient
from penstock.errors import InvalidRequest
from penstock.pipeline.sources.topic import TopicReader, TopicStreamReader
from tests.pipeline.conftest import ServedTopics
from tests.pipeline.support import batch_rows, topic_options

COLUMNS = ["topic", "partition", "offset", "key", "headers", "payload"]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedTopics]:
    """A topic with three partitions of 10, 20 and 30 records."""
    with ServedTopics(tmp_path) as served, SyncClient(topics=served.address) as client:
        client.topic("t").create(format="kafka", partitions=3)
        for number in range(3):
            for i in range(10 * number + 10):
                fields: dict[str, Any] = {"headers": [("h", None)]} if i == 0 else {}
                payload = b"%d-%d" % (number, i)
                client.topic("t").produce(payload, key=b"k%d" % i, partition=number, **fields)
        yield served


@pytest.mark.parametrize("way", ["broker", "directory"])
def test_every_partition_is_read_with_keys_and_headers(served: ServedTopics, way: str) -> None:
    reach = {"broker": served.address} if way == "broker" else {"directory": served.directory}
    rows = batch_rows(topic="t", columns=COLUMNS, **reach)
    assert [(row["partition"], row["offset"], row["key"], row["payload"]) for row in rows] == [
        (number, i, b"k%d" % i, b"%d-%d" % (number, i))
        for number in range(3)
        for i in range(10 * number + 10)
    ]
    assert {row["topic"] for row in rows} == {"t"}
    assert [row["headers"] for row in rows[:2]] == [[{"key": "h", "value": None}], []]
    (last,) = batch_rows(topic="t/2", columns=COLUMNS, startingOffsets='{"t/2": 29}', **reach)
    assert (last["partition"], last["payload"]) == (2, b"2-29")
    plain = batch_rows(topicPattern="t", **reach)
    assert len(plain) == 60
    assert set(plain[0]) == {"topic", "offset", "timestamp", "payload"}


def test_a_partition_and_a_split_are_a_task_each(served: ServedTopics) -> None:
    options = {"topic": "t", "broker": served.address}
    tasks = TopicReader(topic_options(**options)).partitions()
    assert [[one.topic for one in task.ranges] for task in tasks] == [["t"], ["t/1"], ["t/2"]]
    split = TopicReader(topic_options(**options, maxRecordsPerPartition=10)).partitions()
    assert len(split) == 6
    stream = TopicStreamReader(topic_options(**options))
    assert {label: at["next"] for label, at in stream.initialOffset().items()} == {
        "t": 0,
        "t/1": 0,
        "t/2": 0,
    }


def test_what_has_room_for_one_partition_reads_the_first(served: ServedTopics) -> None:
    rows = batch_rows(topic="t", broker=served.address, firstPartition=True)
    assert [row["payload"] for row in rows] == [b"0-%d" % i for i in range(10)]


def test_a_topic_in_aiqs_layout_has_no_keys(tmp_path: Path, write_topic: Any) -> None:
    write_topic("orders", [b"a"])
    assert batch_rows(directory=tmp_path, topic="orders", columns=COLUMNS) == [
        {
            "topic": "orders",
            "partition": 0,
            "offset": 0,
            "key": None,
            "headers": None,
            "payload": b"a",
        }
    ]


def test_keys_are_not_read_from_the_tier_by_itself(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="without the options tier"):
        topic_options(directory=tmp_path, topic="t", tier="s3://b", columns=["key"])
