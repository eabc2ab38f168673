"""Rows into queues, once each."""

import json
import uuid
from datetime import UTC, datetime

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import IntegerType, MapType, StringType, StructField, StructType

from penstock.errors import InvalidRequest, Unavailable
from penstock.pipeline.options import QueueSinkOptions, read_options
from penstock.pipeline.sinks import queue as queue_sink
from penstock.pipeline.sinks.held_rows import Checksum
from penstock.pipeline.sinks.queue import PushLink, QueueWriter, check_json
from penstock.protocol.buffer_lines import Event, encode
from tests.pipeline.support import patiently
from tests.pipeline.test_queue_source import options as queue_options
from tests.pipeline.test_queue_source import rows_of
from tests.support.api import call
from tests.support.wait import until

TEXT = StringType()


def writer(columns: list[str], **options: str) -> QueueWriter:
    given = {"url": "http://127.0.0.1:1", **options}
    return QueueWriter(
        read_options(QueueSinkOptions, given),
        StructType([StructField(name, TEXT) for name in columns]),
    )


def items(sink: QueueWriter, batch: pa.RecordBatch, prefix: str | None = None) -> list[dict]:
    return [json.loads(item) for group in sink._items(batch, prefix, 0) for item in group]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
            st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
            st.recursive(
                st.none() | st.integers() | st.text(max_size=5),
                lambda inner: st.lists(inner, max_size=3),
                max_leaves=5,
            ),
        ),
        max_size=8,
    )
)
def test_any_row_becomes_the_item_it_says(rows) -> None:
    schema = pa.schema(
        [("queue", pa.string()), ("partition", pa.string()), ("payload", pa.string())]
    )
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([queue for queue, _, _ in rows], pa.string()),
            pa.array([partition for _, partition, _ in rows], pa.string()),
            pa.array([json.dumps(payload) for _, _, payload in rows], pa.string()),
        ],
        schema=schema,
    )
    result = items(writer(schema.names), batch, "app:0:1:")
    expected = [
        {
            "queue": queue,
            **({} if partition is None else {"partition": partition}),
            "transactionId": f"app:0:1:{row}",
            "payload": payload,
        }
        for row, (queue, partition, payload) in enumerate(rows)
    ]
    assert result == expected


def test_a_map_of_headers_goes_with_its_row() -> None:
    kind = pa.map_(pa.string(), pa.string())
    maps = [[("b", "2"), ("a", "é")], None, []]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(["1", "2", "3"]), pa.array(maps, kind)], names=["payload", "headers"]
    )
    schema = StructType([StructField("payload", TEXT), StructField("headers", MapType(TEXT, TEXT))])
    sink = QueueWriter(QueueSinkOptions(url="http://x", queue="q"), schema)
    result = items(sink, queue_sink._with_header_texts(batch))
    assert [item.get("headers") for item in result] == [{"a": "é", "b": "2"}, None, None]
    bad = pa.array([[("a b", "c")], None, None], kind)
    with pytest.raises(InvalidRequest, match="header name 'a b'"):
        queue_sink._with_header_texts(batch.set_column(1, "headers", bad))
    with pytest.raises(InvalidRequest, match="must be a map<string,string>"):
        writer(["payload", "headers"], queue="q")


def test_headers_count_for_the_checksum_only_where_there_are_some() -> None:
    """Or a batch that a release without them had begun would not be the same any more."""
    columns = ("payload", "headers")

    def checksum(*values: bytes | None) -> str:
        content = Checksum(columns)
        payload = pa.array([b"1"] * len(values), pa.binary())
        for cut in (slice(0, 1), slice(1, None)):
            content.add(
                pa.RecordBatch.from_arrays(
                    [payload[cut], pa.array(values[cut], pa.binary())], names=columns
                )
            )
        return content.of(len(values))

    plain = Checksum(("payload",))
    plain.add(pa.RecordBatch.from_arrays([pa.array([b"1"] * 3, pa.binary())], names=["payload"]))
    old = plain.of(3)
    assert checksum(None, None, None) == old
    assert len({checksum(None, None, b"a"), checksum(None, b"a", None), old}) == 3


@pytest.mark.parametrize("payload", ['1},{"queue":"x"', "1,2", "{", "", '{"a":1} {"b":2}'])
def test_a_payload_that_is_not_one_json_value_is_refused_with_its_row(payload) -> None:
    good = pa.array([b"1", payload.encode(), b"[2]"], pa.binary())
    with pytest.raises(InvalidRequest, match="row 8 of this task is not JSON"):
        check_json(good, 7)
    check_json(
        pa.array([b' {"a": 1} ', b"2"], pa.binary()), 0
    )  # white space around a value is fine


@pytest.mark.parametrize("payload", [b"NaN", b"[1, Infinity]", b'"\\ud800"', b'{"a":"\\udc00 x"}'])
def test_what_only_lax_readers_take_for_json_is_refused_with_its_row(payload) -> None:
    with pytest.raises(InvalidRequest, match="row 8 of this task is not JSON"):
        check_json(pa.array([b"1", payload, b"[2]"], pa.binary()), 7)


def test_bytes_that_are_no_text_are_refused_with_their_row() -> None:
    with pytest.raises(InvalidRequest, match=r"row 9 of this task: its payload is not UTF-8 .*xff"):
        check_json(pa.array([b"1", b"2", b'"\xff"'], pa.binary()), 7)
    bad = pa.array([b"a", b"\xff"], pa.binary()).view(
        pa.string()
    )  # as Spark hands over CAST(x'ff' AS STRING)
    sink = writer(["partition", "payload"], queue="q", appId="a")
    with pytest.raises(InvalidRequest, match="row 4 of this task: its partition is not UTF-8"):
        list(
            sink._items(
                pa.record_batch({"partition": bad, "payload": pa.array(["1", "2"])}), None, 3
            )
        )
    text = writer(["payload"], queue="q", appId="a", payloadFormat="text")
    with pytest.raises(InvalidRequest, match="row 1 of this task: its payload is not UTF-8"):
        list(text.prepare(iter([pa.record_batch({"payload": bad})])))


def test_texts_become_json_strings_when_asked(capsys) -> None:
    sink = writer(["payload"], queue="q", payloadFormat="text", appId="a")
    batch = pa.RecordBatch.from_pydict({"payload": ["plain", None, '"']})
    assert [item["payload"] for item in items(sink, batch)] == ["plain", None, '"']
    assert capsys.readouterr().err == ""
    writer(["payload"], queue="q")
    assert "at least once" in capsys.readouterr().err
    writer(["payload", "transactionId"], queue="q")
    assert capsys.readouterr().err == ""


def test_rows_that_cannot_become_messages_are_refused_before_anything_runs() -> None:
    for columns, options, text in [
        (["value"], {"queue": "q"}, "needs a column payload"),
        (["payload"], {}, "needs the option queue"),
        (["payload"], {"queue": "q", "payloadFormat": "xml"}, "payloadFormat"),
    ]:
        with pytest.raises(InvalidRequest, match=text):
            writer(columns, **options)
    with pytest.raises(InvalidRequest, match="the column partition must be a string"):
        QueueWriter(
            QueueSinkOptions(url="http://x", queue="q"),
            StructType([StructField("payload", TEXT), StructField("partition", IntegerType())]),
        )


def test_a_push_is_stored_once_and_refusals_are_told(server) -> None:
    queue = f"sink-{uuid.uuid4().hex[:8]}"
    link = PushLink(server.url, None, 5)
    pushed = [
        json.dumps({"queue": queue, "transactionId": f"t{i}", "payload": i}).encode()
        for i in range(50)
    ]
    assert link.push(pushed, repeatable=True).queued == 50
    again = link.push(pushed, repeatable=True)
    assert (again.queued, again.duplicate) == (0, 50)
    with pytest.raises(InvalidRequest, match="refused a push of 1 messages"):
        link.push([b'{"queue": 5, "payload": 1}'], repeatable=True)
    link.close()
    with pytest.raises(Unavailable, match="could not be pushed"):
        PushLink("http://127.0.0.1:1", None, 0.3).push(pushed, repeatable=True)


def test_a_line_for_later_counts_as_stored(server) -> None:
    name = f"q-{uuid.uuid4().hex[:8]}"
    due = datetime(2100, 1, 1, tzinfo=UTC)
    event = Event(queue=name, transaction_id="t", payload=msgspec.Raw(b"1"), deliver_at=due)
    link = PushLink(server.url, None, 20, endpoint=queue_sink.BUFFER_LINES)
    done = link.push([encode(event)], repeatable=True)
    assert (done.queued, done.duplicate) == (1, 0)
    assert call(f"{server.url}/api/v1/scheduled/{name}/Default/t")["payload"] == 1


def test_a_full_queue_gets_each_message_once_as_room_is_made(server) -> None:
    import threading

    queue = f"full-{uuid.uuid4().hex[:8]}"
    options = {"queue": queue, "options": {"maxSize": 10}}
    call(f"{server.url}/api/v1/configure", "POST", options)
    pushed = [
        json.dumps({"queue": queue, "payload": i}).encode() for i in range(25)
    ]  # no ids: nothing recognises them
    link = PushLink(server.url, None, 30)
    counts = []
    pushing = threading.Thread(
        target=lambda: counts.append(link.push(pushed, repeatable=False).queued)
    )
    pushing.start()
    taken: list[int] = []

    def take() -> bool:
        body = call(f"{server.url}/api/v1/pop/queue/{queue}?batch=10&autoAck=true")
        taken.extend(message["data"] for message in (body or {}).get("messages", []))
        return len(taken) >= 25 and not pushing.is_alive()

    until(take, 60, "all messages through a queue of ten")
    link.close()
    assert counts == [25]
    assert sorted(taken) == list(range(25))


@pytest.mark.spark
def test_spark_moves_a_queue_into_another_in_order_and_once(server, spark, tmp_path) -> None:
    from penstock.pipeline.sources.queue import QueueReader
    from tests.pipeline.test_topic_sink import uncommit

    source, target = f"from-{uuid.uuid4().hex[:8]}", f"to-{uuid.uuid4().hex[:8]}"
    link = PushLink(server.url, None, 20)
    link.push(
        [
            json.dumps(
                {
                    "queue": source,
                    "partition": f"p{i % 3}",
                    "payload": i,
                    "headers": {"n": str(i)} if i % 2 else {},
                }
            ).encode()
            for i in range(90)
        ],
        repeatable=False,
    )

    def run() -> None:
        writer = (
            spark.readStream.format("penstock")
            .option("queue", source)
            .option("database", server.database_url)
            .option("group", "mover")
            .load()
            .select("partition", "payload", "headers")
            .writeStream.format("penstock")
            .option("queue", target)
            .option("url", server.url)
            .option("appId", "mover")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
        )
        assert patiently(lambda: writer.start().awaitTermination(300))

    run()
    uncommit(tmp_path / "checkpoint", 0)
    run()
    reader = QueueReader(queue_options(server.database_url, target, streaming=False))
    rows = sorted(
        rows_of(reader, reader.partitions()), key=lambda row: (row["partition"], row["seq"])
    )
    assert [(row["partition"], int(row["payload"])) for row in rows] == [
        (f"p{k}", i) for k in range(3) for i in range(k, 90, 3)
    ]
    assert all(
        row["headers"] == ([("n", row["payload"])] if int(row["payload"]) % 2 else None)
        for row in rows
    )
    batch = (
        spark.read.format("penstock")
        .option("queue", source)
        .option("database", server.database_url)
        .load()
    )
    assert batch.where("partition = 'p1'").count() == 30
