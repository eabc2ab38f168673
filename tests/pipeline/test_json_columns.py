"""Columns of JSON sources, from the record to the payload that a sink writes."""

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import InvalidRequest
from penstock.pipeline.json_schema import typed
from penstock.pipeline.pipeline_file import PipelineSink
from penstock.pipeline.query_builder import as_messages
from penstock.pipeline.report import rate_of, rows_of
from penstock.pipeline.sinks.queue import check_json
from penstock.pipeline.source_columns import QUEUE_DDL, TOPIC_DDL

AT = datetime(2026, 1, 31, 12, tzinfo=UTC)


def source(spark: Any, kind: str, *payloads: str) -> Any:
    """What a topic or queue source gives."""
    if kind == "topic":
        rows = [("in", n, AT, text.encode()) for n, text in enumerate(payloads)]
        return spark.createDataFrame(rows, TOPIC_DDL)
    rows = [("in", "p", n, "i", "t", "", text, AT, {}) for n, text in enumerate(payloads)]
    return spark.createDataFrame(rows, QUEUE_DDL)


def written(frame: Any) -> list[Any]:
    rows = as_messages(frame, PipelineSink(topic="out")).collect()
    return [json.loads(row.payload) for row in rows]


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["topic", "queue"])
def test_where_a_record_came_from_is_not_in_the_payload_unless_it_is_asked_for(
    spark, kind: str
) -> None:
    frame = typed(source(spark, kind, '{"id": 1}', "oops"), "id BIGINT")
    good, bad = written(frame)
    assert good == {"id": 1}
    place = {"_offset": 1} if kind == "topic" else {"_seq": 1, "_id": "i"}
    assert place.items() <= bad.items()  # of a record that does not fit
    assert bad["_corrupt"] == "oops"
    number = "_offset" if kind == "topic" else "_seq"
    assert written(frame.where("_corrupt IS NULL").select("id", number)) == [{"id": 1, number: 0}]


@pytest.mark.spark
def test_a_field_of_the_record_takes_precedence_over_a_column_of_the_source(spark) -> None:
    frame = typed(source(spark, "topic", '{"_topic": "own"}'), "_topic STRING")
    assert frame.columns == ["_topic", "_corrupt", "_reason", "_offset", "_timestamp"]
    assert frame.collect()[0]["_topic"] == "own"


@pytest.mark.spark
def test_a_field_that_would_hide_what_is_wrong_with_a_record_is_refused(spark) -> None:
    with pytest.raises(InvalidRequest, match=r"a field _reason.*from_json on a raw source"):
        typed(source(spark, "topic", "{}"), "_reason STRING")


def test_figures_of_a_batch_are_summed_over_its_sources_where_spark_does_not() -> None:
    sources = [
        {"numInputRows": 10, "processedRowsPerSecond": 2.5},
        {"numInputRows": None, "processedRowsPerSecond": None},
        {"numInputRows": 5, "processedRowsPerSecond": 1.5},
    ]
    connect = {"numInputRows": None, "processedRowsPerSecond": None, "sources": sources}
    assert (rows_of(connect), rate_of(connect)) == (15, 4.0)
    classic = {**connect, "numInputRows": 20, "processedRowsPerSecond": 8.0}
    assert (rows_of(classic), rate_of(classic)) == (20, 8.0)


@pytest.mark.parametrize("text", [r'"\ud83d"', r'{"a": "\ud83d x"}', r'["\udc00"]'])
def test_half_of_a_surrogate_pair_is_called_by_its_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"row 0 .* is not JSON \(half of a surrogate"):
        check_json(pa.array([text.encode()], pa.binary()), 0)
    with pytest.raises(InvalidRequest, match=r"not JSON \(Input data was truncated"):
        check_json(pa.array([b'{"a": "b'], pa.binary()), 0)
