"""Topics as Spark tables and streams, over the files of a directory."""

import os
import pickle
import re
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.errors import InvalidOffset, InvalidRequest, NotFound, PenstockError
from penstock.net.topic_link import TopicLink
from penstock.pipeline.options import (
    LATEST,
    RECORDS_PER_TASK,
    QueueSinkOptions,
    QueueSourceOptions,
    TopicSinkOptions,
    TopicSourceOptions,
    read_options,
)
from penstock.pipeline.sources.topic import (
    GROUP_FROM,
    GROUP_RECORDS,
    GROUP_TOPICS,
    DataLoss,
    TopicReader,
    TopicStreamReader,
)
from penstock.pipeline.sources.topic_catalog import FETCH_BYTES
from penstock.wire.tls import Certificate
from tests.pipeline.conftest import ServedTopics
from tests.pipeline.support import Driver, batch_rows, patiently, rows_of, topic_options
from tests.support.certificates import Authority

spark_test = pytest.mark.spark


def read(spark: Any, directory: Path, **options: Any) -> Any:
    reader = spark.read.format("penstock").option("directory", str(directory))
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load()


@spark_test
def test_spark_reads_every_record_with_its_topic_offset_and_time(
    spark, tmp_path, write_topic
) -> None:
    write_topic("orders", [b"a", b"\xff\x00", b""])
    write_topic("refunds", [b"r"] * 7)
    frame = read(spark, tmp_path, topic="orders,refunds", minPartitions=4)
    assert frame.rdd.getNumPartitions() >= 4
    rows = frame.where("offset < 3").orderBy("topic", "offset").collect()
    assert [(row.topic, row.offset, bytes(row.payload)) for row in rows] == [
        ("orders", 0, b"a"),
        ("orders", 1, b"\xff\x00"),
        ("orders", 2, b""),
        *(("refunds", i, b"r") for i in range(3)),
    ]
    assert all(row.timestamp.year >= 2024 for row in rows)


@spark_test
def test_a_spark_stream_goes_on_where_its_checkpoint_ended_in_batches_of_the_given_size(
    spark, tmp_path, write_topic
) -> None:
    write_topic("orders", [b"%d" % i for i in range(25)])

    def run() -> tuple[list[int], list[int]]:
        query = (
            spark.readStream.format("penstock")
            .option("directory", str(tmp_path))
            .option("topic", "orders")
            .option("maxOffsetsPerTrigger", 10)
            .load()
            .writeStream.format("parquet")
            .option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(300)
        offsets = [
            row.offset
            for row in spark.read.parquet(str(tmp_path / "out")).orderBy("offset").collect()
        ]
        return offsets, [
            progress["numInputRows"]
            for progress in query.recentProgress
            if progress["numInputRows"]
        ]

    assert run() == (list(range(25)), [10, 10, 5])
    write_topic("orders", [b"more"] * 3)
    assert run() == (list(range(28)), [3])
    shutil.rmtree(tmp_path / "orders")
    write_topic("orders", [b"new"] * 40)
    with pytest.raises(Exception, match=r"deleted and created again(.|\n)*failOnDataLoss=false"):
        run()


def test_a_range_is_given_by_offsets_or_by_time_and_is_split_across_tasks(
    tmp_path, write_topic
) -> None:
    write_topic("orders", [b"%d" % i for i in range(100)])
    write_topic("orders", [b"late"])
    options = {"directory": tmp_path, "topic": "orders"}
    some = {**options, "startingOffsets": '{"orders": 10}', "endingOffsets": '{"orders": 60}'}
    assert [row["payload"] for row in batch_rows(**some, minPartitions=4)] == [
        b"%d" % i for i in range(10, 60)
    ]
    assert len(TopicReader(topic_options(**some, minPartitions=4)).partitions()) == 4
    assert len(TopicReader(topic_options(**some, maxRecordsPerPartition=7)).partitions()) == 8
    late = batch_rows(**options, startingOffsets='{"orders": 100}')[0]["timestamp"]
    millis = int(late.timestamp() * 1000)
    assert [row["payload"] for row in batch_rows(**options, startingTimestamp=millis)] == [b"late"]
    assert len(batch_rows(**options, endingTimestamp=late.isoformat())) in (
        100,
        101,
    )  # a millisecond may be shared
    assert batch_rows(**options, startingOffsets="latest") == []


def test_only_the_columns_of_a_given_schema_are_made(tmp_path, write_topic) -> None:
    write_topic("orders", [b"a", b"b"])
    rows = batch_rows(directory=tmp_path, topic="orders", columns=["payload", "offset"])
    assert rows == [{"payload": b"a", "offset": 0}, {"payload": b"b", "offset": 1}]
    with pytest.raises(InvalidRequest, match="it has no 'price'"):
        batch_rows(directory=tmp_path, topic="orders", columns=["price"])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, InvalidRequest, "give either the option 'topic'"),
        ({"topic": "nowhere"}, NotFound, "topic 'nowhere' does not exist"),
        ({"topic": "orders", "startingOffsets": "first"}, InvalidRequest, "startingOffsets"),
        (
            {"topic": "orders", "startingOffsets": '{"orders": 99}'},
            InvalidOffset,
            "offsets 0 to 1; 99 was asked for",
        ),
        ({"topic": "orders", "minPartitions": "many"}, InvalidRequest, "minPartitions"),
        ({"topic": "orders", "startingTimestamp": "noon"}, InvalidRequest, "startingTimestamp"),
        ({"topicPattern": "("}, InvalidRequest, "is a regular expression, not .*: missing \\)"),
    ],
)
def test_a_wrong_option_is_an_error_that_says_what_it_may_be(
    tmp_path, write_topic, options: dict[str, str], error: type[PenstockError], text: str
) -> None:
    write_topic("orders", [b"a"])
    with pytest.raises(error, match=text):
        batch_rows(directory=tmp_path, **options)


def test_new_topics_of_a_pattern_join_a_running_query_and_bytes_bound_a_batch(
    tmp_path, write_topic
) -> None:
    write_topic("logs-a", [b"x" * 88] * 20)  # 100 bytes each with their headers
    driver = Driver(
        tmp_path / "offsets", directory=tmp_path, topicPattern="logs-.*", maxBytesPerTrigger=1000
    )
    assert [len(batch) for batch in driver.run()] == [10, 10]
    write_topic("logs-b", [b"y"])
    assert [[(row["topic"], row["offset"]) for row in batch] for batch in driver.run()] == [
        [("logs-b", 0)]
    ]
    assert driver.run() == []


def test_a_limit_is_shared_by_topics_in_proportion_to_what_waits(tmp_path, write_topic) -> None:
    write_topic("busy", [b"x"] * 90)
    write_topic("calm", [b"x"] * 10)
    driver = Driver(
        tmp_path / "offsets", directory=tmp_path, topic="busy,calm", maxOffsetsPerTrigger=20
    )
    first = driver.run()[0]
    assert sum(row["topic"] == "busy" for row in first) == 18
    assert sum(row["topic"] == "calm" for row in first) == 2


def test_available_now_ends_although_records_keep_coming(tmp_path, write_topic) -> None:
    write_topic("orders", [b"x"] * 10)
    from penstock.pipeline.sources.topic import TopicStreamReader

    reader = TopicStreamReader(topic_options(directory=tmp_path, topic="orders"))
    reader.prepareForTriggerAvailableNow()
    write_topic("orders", [b"y"] * 10)
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert end["orders"]["next"] == 10
    assert reader.latestOffset(end, reader.getDefaultReadLimit()) == end
    assert reader.reportLatestOffset()["orders"]["next"] == 20


def test_a_topic_created_again_is_never_mistaken_for_the_old_one(tmp_path, write_topic) -> None:
    write_topic("orders", [b"old"] * 5)
    driver = Driver(tmp_path / "offsets", directory=tmp_path, topic="orders")
    driver.run()
    shutil.rmtree(tmp_path / "orders")
    write_topic("orders", [b"new"] * 8)
    with pytest.raises(DataLoss, match=r"deleted and created again.*failOnDataLoss=false"):
        driver.run()
    assert [[row["payload"] for row in batch] for batch in driver.run(failOnDataLoss="false")] == [
        [b"new"] * 8
    ]


def test_retention_that_overtakes_a_slow_query_is_an_error_with_the_offsets_lost(
    tmp_path, write_topic
) -> None:
    write_topic("orders", *[[b"x" * 100] * 10] * 3, segment_bytes=1000)
    driver = Driver(tmp_path / "offsets", directory=tmp_path, topic="orders")
    driver.run()
    write_topic("orders", *[[b"x" * 100] * 10] * 3, segment_bytes=1000)
    bases = sorted(
        {path.stem.partition("-")[2] for path in (tmp_path / "orders").glob("data-*.log")}
    )
    for base in bases[:4]:
        for path in (tmp_path / "orders").glob(f"*-{base}.*"):
            path.unlink()
    first = int(bases[4])
    with pytest.raises(
        DataLoss, match=rf"offsets 30 to {first - 1} have aged out before they were read"
    ):
        driver.run()
    assert [[row["offset"] for row in batch] for batch in driver.run(failOnDataLoss="false")] == [
        [*range(first, 60)]
    ]


def test_a_checkpoint_of_another_topic_is_refused(tmp_path, write_topic) -> None:
    write_topic("orders", [b"a"])
    write_topic("refunds", [b"b"])
    Driver(tmp_path / "offsets", directory=tmp_path, topic="orders").run()
    with pytest.raises(
        InvalidRequest, match="belongs to the topics orders; this query reads refunds"
    ):
        Driver(tmp_path / "offsets", directory=tmp_path, topic="refunds").run()
    begun = {
        "orders": {"incarnation": "a", "next": 1}
    }  # a batch that was not finished is run again, first of all
    with pytest.raises(
        InvalidRequest, match="belongs to the topics orders; this query reads refunds"
    ):
        TopicStreamReader(topic_options(directory=tmp_path, topic="refunds")).partitions({}, begun)
    (tmp_path / "offsets").write_text('{"xid": "77"}')
    with pytest.raises(InvalidRequest, match="not of a topic source"):
        Driver(tmp_path / "offsets", directory=tmp_path, topic="refunds").run()


def test_an_offset_that_ran_ahead_of_the_topic_is_an_error(tmp_path, write_topic) -> None:
    write_topic("orders", [b"a"] * 3)
    driver = Driver(tmp_path / "offsets", directory=tmp_path, topic="orders")
    driver.run()
    text = (tmp_path / "offsets").read_text()
    (tmp_path / "offsets").write_text(text.replace('"next": 3', '"next": 9'))
    with pytest.raises(DataLoss, match="ends at offset 3, but 9 was already read"):
        driver.run()


@pytest.fixture
def over_tls(tmp_path: Path) -> Iterator[tuple[ServedTopics, dict[str, str]]]:
    """Topics over TLS, and the options to read and write them."""
    authority = Authority()
    ca, _ = authority.write(tmp_path, "ca", "ca.key")
    with ServedTopics(tmp_path / "data", tls=Certificate(*authority.issue(tmp_path))) as served:
        served.append("in", [b"%d" % i for i in range(20)])
        yield served, {"broker": f"tls://localhost:{served.served.tcp.port}", "ca": str(ca)}


def test_executors_read_over_tls_with_the_ca_that_the_driver_has(over_tls, tmp_path: Path) -> None:
    _, options = over_tls
    reader = TopicReader(topic_options(**options, topic="in", minPartitions=2))
    tasks = reader.partitions()
    (tmp_path / "ca.pem").unlink()  # executors run elsewhere
    executor = pickle.loads(pickle.dumps(reader))
    assert [row["payload"] for row in rows_of(executor, tasks)] == [b"%d" % i for i in range(20)]
    with pytest.raises(InvalidRequest, match="not from a trusted CA"):
        batch_rows(broker=options["broker"], topic="in")


@spark_test
@pytest.mark.skipif(
    not os.environ.get("PENSTOCK_SOAK"),
    reason="the test above, with Spark around it: runs under `make soak`",
)
def test_spark_reads_and_writes_topics_over_tls(spark, over_tls) -> None:
    served, options = over_tls
    frame = spark.read.format("penstock").options(**options, topic="in", minPartitions=2).load()
    frame.select("payload").write.format("penstock").mode("append").options(
        **options, topic="out"
    ).save()
    assert sorted(served.payloads("out"), key=int) == [b"%d" % i for i in range(20)]


def test_small_topics_share_tasks_that_are_cut_the_same_way_again(tmp_path, write_topic) -> None:
    names = [f"t-{i:04}" for i in range(2 * GROUP_FROM)]
    for i, name in enumerate(names):
        write_topic(name, [b"%d" % n for n in range(1 + i % 3)])
    reader = TopicReader(topic_options(directory=tmp_path, topicPattern="t-.*"))
    tasks = reader.partitions()
    assert tasks == reader.partitions()
    assert len(tasks) == 1
    expected = [(name, n) for i, name in enumerate(names) for n in range(1 + i % 3)]
    assert [(row["topic"], row["offset"]) for row in rows_of(reader, tasks)] == expected
    few = TopicReader(
        topic_options(directory=tmp_path, topic=",".join(names[:GROUP_FROM]))
    ).partitions()
    assert len(few) == GROUP_FROM  # as it always was
    options = topic_options(directory=tmp_path, topicPattern="t-.*")
    spans = {f"t-{i:04}": ("x", 0, 10) for i in range(2000)}
    assert len(options.tasks(spans)) == -(-2000 // GROUP_TOPICS)
    assert {part.topic for task in options.tasks(spans) for part in task.ranges} == spans.keys()
    spans |= {"t-0500": ("x", 0, 2 * RECORDS_PER_TASK), "t-0600": ("x", 5, GROUP_RECORDS)}
    sizes = [sum(part.end - part.start for part in task.ranges) for task in options.tasks(spans)]
    assert sum(sizes) == sum(end - start for _, start, end in spans.values())
    assert sum(size > GROUP_RECORDS for size in sizes) == 2  # the large topic's own
    assert (
        len(topic_options(directory=tmp_path, topicPattern="t-.*", minPartitions=200).tasks(spans))
        >= 200
    )


@pytest.mark.parametrize(
    ("known", "given", "text"),
    [
        (
            TopicSourceOptions,
            "startingOffset",
            "has no option 'startingOffset'; did you mean 'startingOffsets'? It has",
        ),
        (QueueSourceOptions, "maxOffsetPerTrigger", "did you mean 'maxOffsetsPerTrigger'?"),
        (TopicSinkOptions, "app_id", "did you mean 'appId'?"),
        (QueueSinkOptions, "zzzzzz", "has no option 'zzzzzz'; it has appId,"),
    ],
)
def test_a_misspelt_option_is_refused_with_the_nearest_one(known, given, text) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(text)):
        read_options(known, {given: "x"})


def test_options_that_spark_adds_pass_and_names_are_the_same_in_any_case() -> None:
    mixed = {
        "CHECKPOINTLOCATION": "/x",
        "queryname": "q",
        "path": "p",
        "__partition_columns": "[]",
        "SUBSCRIBE": "a, b",
        "topic": "c",
        "DIRECTORY": "/y",
        "STARTINGoffsets": "latest",
    }
    read = read_options(TopicSourceOptions, mixed)
    assert (sorted(read.topics), read.starting_offsets) == (["a", "b", "c"], LATEST)


@spark_test
def test_spark_finds_the_source_by_itself_and_refuses_what_it_does_not_know(
    spark, tmp_path, write_topic, capsys
) -> None:
    write_topic("orders", [b"a", b"b"])
    other = spark.newSession()
    other.conf.set("spark.sql.python.filterPushdown.enabled", "false")  # as where it is not set
    reader = other.read.format("penstock").options(directory=tmp_path, topic="orders")
    assert reader.load().where("offset > 0").count() == 1
    today = spark.read.format("penstock").options(directory=tmp_path, topic="orders").load()
    day = batch_rows(directory=tmp_path, topic="orders")[0]["timestamp"].date()
    today = today.where(f"date(timestamp) = DATE '{day}' AND length(payload) > 0")
    today.explain("formatted")
    pushed = r"PushedFilters: \[.*GreaterThanOrEqual\(timestamp.*LessThan\(timestamp"
    assert re.search(pushed, capsys.readouterr().out)
    assert today.count() == 2
    with ThreadPoolExecutor(1) as pool:  # one that has not met a session before
        assert pool.submit(lambda: reader.load().count()).result() == 2
    other.sql(
        f"CREATE TEMPORARY VIEW v USING penstock OPTIONS (directory '{tmp_path}', topic 'orders')"
    )
    assert other.sql("SELECT count(*) FROM v").first()[0] == 2
    wrong = (
        spark.read.format("penstock")
        .options(directory=tmp_path, topic="orders", startingOffset="latest")
        .load()
    )
    with pytest.raises(Exception, match="did you mean 'startingOffsets'") as failure:
        wrong.count()
    assert "Traceback" not in str(failure.value)  # one sentence
    sink = (
        spark.read.format("penstock")
        .options(directory=tmp_path, topic="orders")
        .load()
        .select("payload")
        .write
    )
    with pytest.raises(Exception, match="a topic sink has no option 'apid'; did you mean 'appId'"):
        sink.format("penstock").mode("append").options(
            broker="127.0.0.1:1", topic="x", apId="y"
        ).save()
    stream = (
        spark.readStream.format("penstock")
        .options(directory=tmp_path, topic="orders", maxOffsets="5")
        .load()
    )
    started = (
        stream.writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "c"))
        .queryName("named")
    )
    with pytest.raises(Exception, match="a topic source has no option 'maxoffsets'") as failure:
        patiently(lambda: started.trigger(availableNow=True).start().awaitTermination())
    assert "Traceback" not in str(failure.value)


def test_a_driver_on_the_brokers_machine_reads_its_files_if_they_are_the_brokers(
    tmp_path: Path, write_topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.net.topic_link import TopicLink
    from tests.pipeline.conftest import ServedTopics

    fetched: list[str] = []
    real = TopicLink.fetch

    def fetch(self: TopicLink, topic: str, *given: Any, **more: Any) -> Any:
        fetched.append(topic)
        return real(self, topic, *given, **more)

    monkeypatch.setattr(TopicLink, "fetch", fetch)
    write_topic("orders", [b"another"], directory=tmp_path / "other")
    with ServedTopics(tmp_path / "data") as served:
        served.append("orders", [b"a", b"b"])
        for directory, asked in (("data", []), ("other", ["orders"]), ("none", ["orders"])):
            monkeypatch.setenv("PENSTOCK_DATA_DIRECTORY", str(tmp_path / directory))
            fetched.clear()
            rows = batch_rows(broker=served.address, topic="orders")
            assert [row["payload"] for row in rows] == [b"a", b"b"]
            assert fetched == asked, directory


def test_records_that_were_asked_for_ahead_are_not_another_requests_answer(tmp_path: Path) -> None:
    """A link asks for what follows while a part is used. The broker is gone then, or something else
    is asked first."""
    payloads = [b"%06d" % number + b"x" * 994 for number in range(4000)]
    with ServedTopics(tmp_path / "broker") as served:
        for name in ("one", "two"):
            served.append(name, payloads)
        with TopicLink(served.address, 20) as link:
            whole = link.info("one").next_offset
            start = link.fetch("one", 0, FETCH_BYTES, end=whole).next_offset
            assert 0 < start < whole
            assert link.info("two").next_offset == 4000
            again = link.fetch("one", start, FETCH_BYTES, end=whole)
            other = link.fetch("two", 1000, FETCH_BYTES, end=whole)
            assert (again.first_offset, other.first_offset) == (start, 1000)
            port = served.served.tcp.port
            for connection in psutil.Process().net_connections("tcp"):
                if connection.laddr.port == port and connection.status == "ESTABLISHED":
                    socket.socket(fileno=os.dup(connection.fd)).shutdown(socket.SHUT_RDWR)
            rest = link.fetch("two", other.next_offset, FETCH_BYTES, end=whole)
            assert rest.first_offset == other.next_offset
        rows = batch_rows(broker=served.address, topic="one,two")
    assert [row["payload"] for row in rows] == payloads * 2
