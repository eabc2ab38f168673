"""Rows into topics, once each; and reading topics from a broker instead of from files."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from penstock import pipeline
from penstock.errors import InvalidRequest, Unavailable
from penstock.log import producers
from penstock.net.topic_link import TopicLink
from penstock.pipeline.options import TopicSinkOptions, read_options
from penstock.pipeline.sinks import topic as topic_sink
from penstock.pipeline.sinks.topic import Cutter, TopicWriter, _Appender, sequence
from penstock.protocol import frames
from penstock.protocol.sink_claims import Claim
from tests.pipeline.support import Driver, batch_rows, patiently


def appends(cutter: Cutter, arrays: list[pa.Array]) -> list[list[bytes]]:
    outcome = [piece for array in arrays for piece in cutter.add(array)]
    outcome += cutter.rest()
    result = []
    for lengths, data in outcome:
        ends = [0, *lengths.cumsum().tolist()]
        result.append([bytes(data[a:b]) for a, b in pairwise(ends)])
    return result


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.binary(max_size=30), max_size=60),
    st.lists(st.integers(0, 60), max_size=6),
    st.integers(1, 9),
    st.integers(1, 80),
)
def test_where_appends_are_cut_depends_on_the_payloads_alone(payloads, borders, rows, size) -> None:
    places = [0, *sorted(min(border, len(payloads)) for border in borders), len(payloads)]
    arrays = [pa.array(payloads, pa.binary()).slice(a, b - a) for a, b in pairwise(places)]
    whole = appends(Cutter(rows, size), [pa.array(payloads, pa.binary())])
    assert appends(Cutter(rows, size), arrays) == whole
    assert [payload for append in whole for payload in append] == payloads
    assert all(len(append) <= rows for append in whole)
    assert all(sum(map(len, append)) <= size or len(append) == 1 for append in whole)


def place(app: str, batch: int, task: int) -> Claim:
    return Claim("out", app, batch, task, "", "run")


def write(
    broker: Any,
    claim: Claim | None,
    payloads: list[bytes],
    topic: str = "out",
    stop_after: int | None = None,
) -> None:
    with TopicLink(broker.address, 5) as link:
        appender = _Appender(link, claim)
        if stop_after is None:
            appender.add(topic, pa.array(payloads, pa.binary()))
            appender.finish()
        else:  # a task that is killed after so many appends
            for lengths, data in list(Cutter().add(pa.array(payloads, pa.binary())))[:stop_after]:
                appender._append(topic, lengths, data)


def test_a_batch_run_again_is_stored_once_wherever_it_was_interrupted(broker, monkeypatch) -> None:
    monkeypatch.setattr(topic_sink.Cutter.__init__, "__defaults__", (10, 1 << 20))
    payloads = [b"%d" % i for i in range(95)]
    write(broker, place("app", 0, 0), payloads, stop_after=4)
    write(broker, place("app", 0, 0), payloads)
    write(broker, place("app", 0, 0), payloads)
    assert broker.payloads("out") == payloads
    write(broker, place("app", 7, 0), [b"later"])  # batches in between wrote nothing here
    write(broker, place("app", 7, 0), [b"later"])
    write(broker, place("app", 7, 1), [b"another task"])
    write(broker, place("other", 7, 0), [b"another query"])
    assert broker.payloads("out") == [*payloads, b"later", b"another task", b"another query"]


def test_numbers_of_a_query_may_leave_gaps_and_those_of_a_producer_may_not() -> None:
    assert sequence(0, 0) == frames.SPARSE
    assert sequence(2, 1) == frames.SPARSE + 2 * (1 << 24) + 1
    known = producers.Producers({}, 60)
    known.add(producers.Producer(b"p" * 16, sequence(1, 0)), 5, 2, 0)
    assert known.earlier(producers.Producer(b"p" * 16, sequence(9, 0))) is None
    assert known.earlier(producers.Producer(b"p" * 16, sequence(1, 0))) == (5, 2)
    assert known.earlier(producers.Producer(b"p" * 16, sequence(0, 0))) == (5, 0)
    known.add(producers.Producer(b"q" * 16, 4), 7, 1, 0)
    with pytest.raises(Exception, match="comes too early"):
        known.earlier(producers.Producer(b"q" * 16, 6))


@pytest.mark.parametrize(
    ("fields", "options", "text"),
    [
        (
            [("payload", IntegerType())],
            {"topic": "t"},
            "needs a column payload, binary or string; the rows have payload int",
        ),
        ([("value", BinaryType())], {"topic": "t"}, "needs a column payload"),
        ([("payload", BinaryType())], {}, "needs the option topic, or a column topic"),
        ([("payload", BinaryType())], {"topic": "t", "broker": ""}, "'broker' is missing"),
    ],
)
def test_rows_that_cannot_become_records_are_refused_before_anything_runs(
    fields, options, text
) -> None:
    schema = StructType([StructField(name, kind) for name, kind in fields])
    with pytest.raises(InvalidRequest, match=text):
        TopicWriter(
            read_options(TopicSinkOptions, {"broker": "x:1", **options}), schema, streaming=True
        )


def test_a_sink_without_an_app_id_says_that_it_writes_at_least_once(capsys) -> None:
    schema = StructType([StructField("payload", StringType())])
    TopicWriter(TopicSinkOptions(broker="x:1", topic="t"), schema, streaming=True)
    assert "at least once" in capsys.readouterr().err
    TopicWriter(TopicSinkOptions(broker="x:1", topic="t", app_id="a"), schema, streaming=True)
    assert capsys.readouterr().err == ""


def test_a_broker_gives_the_same_rows_as_its_files_and_a_group_shows_the_position(
    broker, tmp_path
) -> None:
    for k in range(5):
        broker.append("orders", [b"%d" % i for i in range(100 * k, 100 * k + 100)])
    files = batch_rows(directory=broker.directory, topic="orders")
    assert batch_rows(broker=broker.address, topic="orders") == files
    assert (
        batch_rows(
            broker=broker.address, directory=broker.directory, topic="orders", minPartitions=3
        )
        == files
    )
    some = batch_rows(
        broker=broker.address,
        topic="orders",
        startingOffsets='{"orders": 99}',
        endingOffsets='{"orders": 301}',
    )
    assert some == files[99:301]
    driver = Driver(
        tmp_path / "offsets",
        broker=broker.address,
        topic="orders",
        group="spark",
        maxOffsetsPerTrigger=300,
    )
    assert [len(batch) for batch in driver.run()] == [300, 200]
    assert broker.served.groups.committed("spark", "orders") == 500


def test_a_broker_that_is_away_for_a_while_delays_a_request_and_then_fails_it(tmp_path) -> None:
    from tests.pipeline.conftest import ServedTopics

    with ServedTopics(tmp_path / "broker") as broker:
        broker.append("orders", [b"x"])
        link = TopicLink(broker.address, patience=20)
        assert link.info("orders").next_offset == 1
        port = broker.served.tcp.port
    with ServedTopics(tmp_path / "broker", tcp={"port": port}) as broker:
        assert link.info("orders").next_offset == 1
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"did not answer for 0\.5 s.*brokerTimeout"):
        TopicLink(f"127.0.0.1:{port}", patience=0.5).info("orders")
    assert time.monotonic() - began < 20


def uncommit(checkpoint: Path, *batches: int) -> None:
    """Make Spark forget that it finished these batches: what a driver killed before it noted them
    leaves behind.
    """
    for batch in batches:
        for path in (checkpoint / "commits").glob(f"*{batch}*"):
            if path.name in (str(batch), f".{batch}.crc"):
                path.unlink()


@pytest.mark.spark
def test_spark_writes_a_stream_once_although_a_batch_is_run_again(spark, broker, tmp_path) -> None:
    broker.append("orders", [b"%d" % i for i in range(60)])

    def run(app: str | None, out: str, checkpoint: Path) -> None:
        writer = (
            spark.readStream.format("penstock")
            .option("broker", broker.address)
            .option("topic", "orders")
            .option("maxOffsetsPerTrigger", 40)
            .option("minPartitions", 2)
            .load()
            .selectExpr(f"'{out}' AS topic", "CAST(payload AS STRING) || '!' AS payload")
            .writeStream.format("penstock")
            .option("broker", broker.address)
            .option("checkpointLocation", str(checkpoint))
        )
        writer = writer.option("appId", app) if app else writer
        writer = writer.trigger(availableNow=True)
        assert patiently(lambda: writer.start().awaitTermination(300))

    checkpoint = tmp_path / "checkpoint"
    run("copy", "once", checkpoint)
    expected = sorted(b"%d!" % i for i in range(60))
    assert sorted(broker.payloads("once")) == expected
    shutil.copytree(checkpoint, tmp_path / "other")
    uncommit(checkpoint, 1)
    run("copy", "once", checkpoint)
    assert sorted(broker.payloads("once")) == expected
    uncommit(tmp_path / "other", 1)
    run(None, "twice", tmp_path / "other")  # the same without appId: the batch is written again
    assert len(broker.payloads("twice")) == 20


def test_append_times_travel_as_runs() -> None:
    body = frames.times(np.array([5, 5, 7], np.int64))
    assert body.hex(" ", 4) == "00000002 00000002 00000001 00000000 00000005 00000000 00000007"
    assert frames.times(np.empty(0, np.int64)).hex() == "00000000"


@pytest.mark.spark
def test_a_thread_that_registers_the_source_writes(spark, broker) -> None:
    """Without, Spark reports that there is no penstock.DefaultSource."""
    rows = spark.range(3).selectExpr("CAST(id AS STRING) AS payload")

    def write() -> None:
        pipeline.register(spark)
        sink = {"topic": "threads", "broker": broker.address, "appId": "threads"}
        rows.coalesce(1).write.format("penstock").mode("append").options(**sink).save()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(write).result(300)
    assert broker.payloads("threads") == [b"0", b"1", b"2"]
