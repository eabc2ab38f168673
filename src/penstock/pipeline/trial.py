"""Run a pipeline's steps on given rows and compare the results (`penstock pipeline test`), or run
them on the first records of its sources (`penstock pipeline preview`).

Nothing is written, and no checkpoint is used. The steps are built by the same code as in a run. The
sources are finite, so an aggregate covers all their rows and a watermark drops nothing. In a test,
the rows of a source are:

- for `format: json`, payloads: an object, or a string for a payload that does not fit;
- for other topics and queues, objects with the source's columns, or strings, which are payloads;
- for tables, objects with their columns.

Missing columns of a topic or queue are filled in: `offset` and `seq` count from 0, and times
advance by one second from 1970-01-01.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec.structs import replace
from pyspark.sql import functions as f
from pyspark.sql.types import BinaryType

from penstock.errors import ConfigError
from penstock.pipeline.pipeline_file import PipelineFile, PipelineSource
from penstock.pipeline.query_builder import Frames, frames, read_source
from penstock.pipeline.source_columns import QUEUE_COLUMNS, TOPIC_COLUMNS, ddl

Rows = list[dict[str, Any]]
DEAD = "dead:"  # prefix of a source's name that means its dead letters
START = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True)
class Difference:
    """The differences between a view's rows and the expected rows."""

    view: str
    missing: Rows
    unexpected: Rows


def given_rows(pipeline: PipelineFile, text: str, where: str) -> dict[str, list[Any]]:
    """Return rows by source from JSON: an object of lists, or a list for the first source."""
    return _by_view(text, where, list(pipeline.views), next(iter(pipeline.views)))


def expected_rows(pipeline: PipelineFile, text: str, where: str) -> dict[str, list[Any]]:
    """Return rows by view from JSON: an object of lists, or a list for the last view."""
    views = [*pipeline.views, *(step.name for step in pipeline.steps)]
    dead = [f"{DEAD}{name}" for name, source in pipeline.views.items() if source.deadLetter]
    return _by_view(text, where, [*views, *dead], views[-1])


def _by_view(text: str, where: str, names: list[str], default: str) -> dict[str, list[Any]]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    rows = {default: value} if isinstance(value, list) else value
    if not isinstance(rows, dict) or not all(isinstance(one, list) for one in rows.values()):
        raise ConfigError(f"{where}: give a list of rows, or an object with a list for each view")
    for name in rows:
        if name not in names:
            raise ConfigError(f"{where}: unknown view {name!r}; the views are {', '.join(names)}")
    return rows


def on_rows(spark: Any, pipeline: PipelineFile, rows: Mapping[str, list[Any]]) -> Frames:
    return frames(
        spark, pipeline, lambda name, source: _frame(spark, name, source, rows.get(name, []))
    )


def on_first_records(spark: Any, pipeline: PipelineFile, records: int) -> Frames:
    batch = replace(pipeline, trigger="batch")
    return frames(
        spark, pipeline, lambda _, source: read_source(spark, batch, source).limit(records)
    )


def compare(made: Frames, expected: Mapping[str, list[Any]]) -> list[Difference]:
    """Return the differences. The order of rows is ignored. So are columns that begin with an
    underscore, if no expected row has such a column."""
    differences = []
    for view, wanted in expected.items():
        hidden = not any(name.startswith("_") for row in wanted for name in row)
        actual = Counter(_text(row) for row in rows_of(made, view, hidden=hidden))
        missing = Counter(_text(row) for row in wanted)
        missing.subtract(actual)
        lacking, unexpected = (
            [json.loads(row) for row in rows.elements()] for rows in (+missing, -missing)
        )
        if lacking or unexpected:
            differences.append(Difference(view, lacking, unexpected))
    return differences


def rows_of(made: Frames, view: str, *, hidden: bool = False, limit: int | None = None) -> Rows:
    """Return a view's rows as JSON, with `hidden` without columns that begin with `_`."""
    frame = made.dead[view.removeprefix(DEAD)] if view.startswith(DEAD) else made.views[view]
    names = [name for name in frame.columns if not (hidden and name.startswith("_"))]
    columns = [_readable(frame, name) for name in names]
    options = {"ignoreNullFields": "false"}
    texts = frame.select(f.to_json(f.struct(*columns), options).alias("row"))
    rows = texts if limit is None else texts.limit(limit)
    return [json.loads(row["row"]) for row in rows.collect()]


def _readable(frame: Any, name: str) -> Any:
    """Return a column, with bytes as text: `to_json` would encode them in base64."""
    column = frame[f"`{name}`"]
    binary = isinstance(frame.schema[name].dataType, BinaryType)
    return f.decode(column, "UTF-8").alias(name) if binary else column


def _text(row: Any) -> str:
    return json.dumps(row, sort_keys=True, ensure_ascii=False)


def _frame(spark: Any, name: str, source: PipelineSource, rows: list[Any]) -> Any:
    if source.static:
        if not rows:
            raise ConfigError(f"source {name}: give at least one row, which defines the columns")
        return spark.createDataFrame(rows)
    schema = QUEUE_COLUMNS if source.queue else TOPIC_COLUMNS
    records = [_record(name, source, number, row) for number, row in enumerate(rows)]
    rows = [tuple(one[column] for column in schema.names) for one in records]
    return spark.createDataFrame(rows, ddl(schema))


def _record(name: str, source: PipelineSource, number: int, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict | str):
        raise ConfigError(f"source {name}: a row is an object or a text, not {row!r}")
    payload = row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)
    given = row if isinstance(row, dict) and source.format == "raw" else {"payload": payload}
    at = START + timedelta(seconds=number)
    defaults: dict[str, Any]
    if source.queue:
        defaults = {
            **dict.fromkeys(QUEUE_COLUMNS.names),
            "queue": source.queue,
            "partition": "Default",
            "seq": number,
            "id": f"{number:08d}-0000-0000-0000-000000000000",
            "transactionId": str(number),
            "payload": "null",
            "createdAt": at,
        }
    else:
        topic = (source.topic or name).split(",")[0].strip()
        defaults = {"topic": topic, "offset": number, "timestamp": at, "payload": ""}
    for column in given:
        if column not in defaults:
            raise ConfigError(
                f"source {name}: unknown column {column!r}; the columns are {', '.join(defaults)}"
            )
    made = {**defaults, **given}
    for column in ("createdAt", "timestamp"):
        if isinstance(made.get(column), str):
            made[column] = datetime.fromisoformat(made[column])
    if not source.queue and isinstance(made["payload"], str):
        made["payload"] = made["payload"].encode()
    return made
