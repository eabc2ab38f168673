"""Filters of a query narrow what is read, and are applied exactly; batches that wait for more."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
)

from penstock.errors import InvalidRequest
from penstock.pipeline.options import QueueSourceOptions, read_options
from penstock.pipeline.sources.queue import QueueReader, QueueStreamReader
from penstock.pipeline.sources.topic import TopicReader, TopicStreamReader
from penstock.pipeline.sources.trigger_delay import TriggerDelay
from tests.pipeline.support import rows_of, topic_options
from tests.pipeline.test_queue_source import Stream, options
from tests.queues.support import push, running

TIME, CREATED = ("timestamp",), ("createdAt",)


def filtered(reader: Any, *filters: Any) -> tuple[list[dict[str, Any]], int, list[Any]]:
    """The rows, how many records the tasks span, and the filters that are left to Spark."""
    left = list(reader.pushFilters(list(filters)))
    tasks = reader.partitions()
    span = sum(part.end - part.start for task in tasks for part in getattr(task, "ranges", []))
    return rows_of(reader, tasks), span, left


def test_a_filter_on_a_topics_times_reads_only_the_records_of_these_times(
    tmp_path, write_topic
) -> None:
    for number in range(6):
        write_topic("orders", [f"{number}-{i}".encode() for i in range(10)])
        time.sleep(0.002)  # the index finds whole milliseconds
    given: dict[str, Any] = {"directory": tmp_path, "topic": "orders"}
    rows = filtered(TopicReader(topic_options(**given)))[0]
    times = sorted({row["timestamp"] for row in rows})
    assert len(times) == 6
    middle = [row for row in rows if times[2] <= row["timestamp"] < times[4]]

    some, span, left = filtered(
        TopicReader(topic_options(**given)),
        IsNotNull(TIME),
        GreaterThanOrEqual(TIME, times[2]),
        LessThan(TIME, times[4]),
    )
    assert (some, left) == (middle, [])
    assert span == 30  # of 60: the millisecond that `times[4]` is in is read and sorted out
    columns = ["payload"]  # the time is applied where it is not a column of the result
    assert filtered(
        TopicReader(topic_options(columns, **given)),
        GreaterThan(TIME, times[1]),
        LessThanOrEqual(TIME, times[3]),
    )[0] == [{"payload": row["payload"]} for row in middle]
    microsecond = timedelta(microseconds=1)
    exact = filtered(TopicReader(topic_options(**given)), GreaterThan(TIME, times[4] - microsecond))
    assert [row["offset"] for row in exact[0]] == list(range(40, 60))
    one = filtered(TopicReader(topic_options(**given)), EqualTo(TIME, times[5]))
    assert [row["offset"] for row in one[0]] == list(range(50, 60))
    ancient = datetime(1960, 1, 1, tzinfo=UTC)
    assert filtered(TopicReader(topic_options(**given)), LessThan(TIME, ancient))[0] == []


def test_what_a_topic_cannot_apply_is_left_to_spark(tmp_path, write_topic) -> None:
    write_topic("a", [b"1", b"2", b"3"])
    write_topic("b", [b"4"])
    reader = TopicReader(topic_options(directory=tmp_path, topicPattern="."))
    others = [
        Not(EqualTo(("offset",), 1)),
        StringContains(("topic",), "a"),
        EqualTo(TIME, "soon"),
        GreaterThan(("payload", "deep"), 1),
    ]
    rows, span, left = filtered(
        reader, *others, In(("topic",), ["a", "c"]), LessThan(("offset",), 2)
    )
    assert left == others
    assert [row["payload"] for row in rows] == [b"1", b"2"]
    assert span == 2
    # The check of a session in which Spark offers no filters, its default.
    assert reader.pushFilters.__func__ is DataSourceReader.pushFilters


async def test_a_queue_applies_filters_on_createdAt_and_partition(database_url: str) -> None:
    async with running(database_url) as queues:
        for number in range(4):
            for partition in ("eu", "us", "it's"):
                await push(queues, "orders", number, partition=partition)
    rows = filtered(QueueReader(options(database_url, streaming=False)))[0]
    assert len(rows) == 12
    times = sorted(row["createdAt"] for row in rows)

    def read(*filters: Any, **more: Any) -> tuple[set[Any], list[Any]]:
        reader = QueueReader(options(database_url, streaming=False, **more))
        got, _, left = filtered(reader, *filters)
        return {(row["partition"], row["payload"]) for row in got}, left

    def expected(wanted: Any) -> set[Any]:
        return {(row["partition"], row["payload"]) for row in rows if wanted(row)}

    assert read(GreaterThan(CREATED, times[3]), LessThanOrEqual(CREATED, times[7])) == (
        expected(lambda row: times[3] < row["createdAt"] <= times[7]),
        [],
    )
    assert read(In(("partition",), ["us", "it's", "nowhere"]), IsNotNull(CREATED)) == (
        expected(lambda row: row["partition"] != "eu"),
        [],
    )
    assert read(EqualTo(("partition",), "nowhere")) == (set(), [])
    left = [Not(EqualTo(("partition",), "eu")), IsNotNull(("headers",)), EqualTo(("seq",), 1)]
    assert read(*left) == (expected(lambda row: True), left)
    # Kafka's word for some partitions of one topic, for streams too.
    assert read(assign='{"orders": ["eu"]}', queue="orders") == (
        expected(lambda row: row["partition"] == "eu"),
        [],
    )
    stream = Stream(
        QueueStreamReader(
            options(database_url, assign='{"orders": ["eu", "us"]}', maxOffsetsPerTrigger=3)
        )
    )
    batches = [stream.batch() for _ in range(4)]
    assert [len(batch) for batch in batches] == [3, 3, 2, 0]
    assert {row["partition"] for batch in batches for row in batch} == {"eu", "us"}
    for wrong in ('{"orders": "eu"}', "[1]", '{"a": ["x"], "b": ["y"]}', "x"):
        with pytest.raises(InvalidRequest, match=r"such as \{\"orders\": \[\"eu\", \"us\"\]\}"):
            options(database_url, assign=wrong)
    with pytest.raises(InvalidRequest, match="name different queues"):
        options(database_url, assign='{"others": ["eu"]}')


def test_a_batch_waits_for_enough_records_but_not_for_ever(tmp_path, write_topic) -> None:
    now = 0.0
    given = {"queue": "q", "minOffsetsPerTrigger": "10", "maxTriggerDelay": "2m"}
    delay = TriggerDelay(read_options(QueueSourceOptions, given), clock=lambda: now)
    assert not delay.holds(enough=False)  # the first batch of a run
    assert delay.holds(enough=False)
    now = 119.0
    assert delay.holds(enough=False)
    assert not delay.holds(enough=True)
    now = 238.0
    assert delay.holds(enough=False)
    now = 240.0
    assert not delay.holds(enough=False)
    with pytest.raises(InvalidRequest, match="30s or 15m, not '90'"):
        read_options(QueueSourceOptions, {"queue": "q", "maxTriggerDelay": "90"})
    with pytest.raises(InvalidRequest, match="'minOffsetsPerTrigger' \\(10\\) is above"):
        read_options(QueueSourceOptions, {**given, "maxOffsetsPerTrigger": "9"})

    write_topic("orders", [b"x"] * 3)
    reader = TopicStreamReader(
        topic_options(directory=tmp_path, topic="orders", minOffsetsPerTrigger=5)
    )
    limit = reader.getDefaultReadLimit()
    first = reader.latestOffset(reader.initialOffset(), limit)
    assert first["orders"]["next"] == 3
    write_topic("orders", [b"x"] * 4)
    assert reader.latestOffset(first, limit) == first
    write_topic("orders", [b"x"])
    assert reader.latestOffset(first, limit)["orders"]["next"] == 8
    write_topic("orders", [b"x"])
    ending = TopicStreamReader(
        topic_options(directory=tmp_path, topic="orders", minOffsetsPerTrigger=50)
    )
    ending.prepareForTriggerAvailableNow()  # a run that ends by itself waits for nothing
    assert ending.latestOffset(ending.latestOffset(first, limit), limit)["orders"]["next"] == 9


def test_a_stream_begins_by_the_time_given_for_each_topic(tmp_path, write_topic) -> None:
    write_topic("a", [b"1"])
    write_topic("b", [b"1"])
    time.sleep(0.002)
    between = round(datetime.now(UTC).timestamp() * 1000)
    time.sleep(0.002)
    write_topic("a", [b"2"])
    write_topic("b", [b"2"])

    def starts(by_time: str) -> dict[str, int]:
        given = topic_options(
            directory=tmp_path, subscribePattern="a|b", startingOffsetsByTimestamp=by_time
        )
        offsets = TopicStreamReader(given).initialOffset()
        return {topic: at["next"] for topic, at in offsets.items()}

    assert starts(f'{{"a": {between}}}') == {"a": 1, "b": 0}
    assert starts(f'{{"a": {{"0": {between}}}, "b": {between}}}') == {"a": 1, "b": 1}
    for wrong in ('{"a": {"x": 5}}', "5", '{"a": "soon"}'):
        with pytest.raises(InvalidRequest, match="startingOffsetsByTimestamp"):
            starts(wrong)
    with pytest.raises(InvalidRequest, match="not both"):
        topic_options(
            directory=tmp_path, topic="a", startingTimestamp=1, startingOffsetsByTimestamp='{"a":1}'
        )
