"""Validation before Spark starts: columns, views, schemas, functions and topics, in a second
instead of a JVM's start.

It is the lesser of two: where Java is there, `validate` goes on to Spark's own analyzer
(`query_builder.verify`), which says exactly what a run would. Here nothing is known of types, of
functions, and of what streams can do.

SQL is parsed and its columns are resolved by sqlglot in Spark's dialect, against the columns each
source is known to have. What a Python step makes of its columns cannot be known here, so nothing is
said about columns after one.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import sqlglot
from sqlglot import exp
from sqlglot.errors import OptimizeError, ParseError
from sqlglot.optimizer.qualify import qualify

from penstock.errors import ConfigError, InvalidRequest, NotFound, PenstockError
from penstock.net.addresses import resource
from penstock.net.broker_caller import BrokerCaller
from penstock.net.topic_link import TopicLink
from penstock.pipeline.options import QUEUE_SINK, TOPIC_SINK, Options
from penstock.pipeline.pipeline_file import (
    Pipeline,
    Sink,
    Source,
    Step,
    sink_place,
    source_options,
    texts,
)
from penstock.pipeline.source_columns import CORRUPT, QUEUE_DDL, REASON, TOPIC_DDL, origin_columns
from penstock.pipeline.sources.postgres import Postgres

Columns = dict[str, str]
VARYING = {"rand", "random", "randn", "uuid", "shuffle", "randstr", "uniform"}
VARYING |= {"current_timestamp", "now", "current_date", "curdate", "localtimestamp", "current_time"}
WINDOWS = {"_window": "window", "_session_window": "session_window"}
UNORDERED = (
    "the sink's rows come out of a shuffle (an aggregate, a join, a repartition), in no fixed "
    "order: name the columns that order them in sink.orderBy, so that each is written exactly once"
)


def check(pipeline: Pipeline, *, ask_broker: bool = True) -> list[str]:
    """Raise ConfigError for what is wrong; returns the sink's columns, none if not known."""
    views: dict[str, Columns | None] = {
        name: source_columns(name, source) for name, source in pipeline.views.items()
    }
    for step in pipeline.steps:
        if step.python:  # it must be there; what it makes of the columns is its own affair
            load_function(step.python, f"step {step.name}")
        views[step.name] = _sql_columns(step, views) if step.sql else None
    last = next(reversed(views))
    for name, sink in pipeline.outputs.items():
        columns = views[sink.view or last]
        if columns is not None:
            _check_sink(name, sink, columns)
        if sink.foreachBatch:
            load_function(sink.foreachBatch, sink_place(name))
        _check_aggregates(pipeline, sink, columns)
    _check_repeatable(pipeline)
    _check_options(pipeline)
    if ask_broker:
        _check_broker(pipeline)
        _check_queues(pipeline)
        resolve_routes(pipeline)
    return list(views[next(iter(pipeline.outputs.values())).view or last] or ())


def parse_schema(name: str, ddl: str) -> Columns:
    """Column names and types of a schema string; ConfigError points at what is wrong in it."""
    try:
        table = sqlglot.parse_one(f"CREATE TABLE t ({ddl})", dialect="spark").find(exp.Schema)
    except ParseError as error:
        detail = error.errors[0] if error.errors else {}
        near = f" near {detail['highlight']!r}" if detail.get("highlight") else ""
        raise ConfigError(f"source {name}: the schema is not valid{near}: {ddl!r}") from None
    parts = table.expressions if table else []
    columns = {column.name: column.kind.sql("spark") for column in parts if column.kind}
    if not columns or len(columns) != len(parts):
        raise ConfigError(
            f"source {name}: every column of the schema has a name and a type: {ddl!r}"
        )
    return columns


def source_columns(name: str, source: Source) -> Columns | None:
    """The columns of a source's view; None for Parquet, whose files say."""
    if source.parquet:
        return None
    plain = parse_schema(name, QUEUE_DDL if source.queue else TOPIC_DDL)
    if source.format != "json" or source.schema is None:
        return plain
    typed = parse_schema(name, source.schema)
    with naming(f"source {name}"):
        origin = origin_columns("queue" if source.queue else "topic", list(typed))
    meta = {f"_{column}": plain[column] for column in origin}
    return {**typed, CORRUPT: "STRING", REASON: "STRING", **meta}


def _check_options(pipeline: Pipeline) -> None:
    """By the very code that will read them, on Spark's side; and no name that nothing reads."""
    from penstock.pipeline.sources.queue import QueueOptions
    from penstock.pipeline.sources.topic import TopicOptions, TopicStreamReader

    for name, source in pipeline.views.items():
        if source.parquet:
            if "://" not in source.parquet and not Path(source.parquet).exists():
                raise ConfigError(f"source {name}: there is no directory {source.parquet}")
            continue
        columns = source_columns(name, source) or {}
        for column in source.watermark:
            if column not in columns:
                raise ConfigError(
                    f"source {name}: watermark names {column!r}; there are {', '.join(columns)}"
                )
            if not columns[column].upper().startswith("TIMESTAMP"):
                raise ConfigError(
                    f"source {name}: watermark: {column} is {columns[column]}, not TIMESTAMP"
                )
        options = Options(texts(source_options(pipeline, source)))
        with naming(f"source {name}"):
            if source.queue:
                QueueOptions(options, [], streaming=pipeline.streaming)
            else:
                checked = TopicOptions(options, [])
                if pipeline.streaming:
                    TopicStreamReader(checked)
    sinks = {
        "topic": (TOPIC_SINK, "a topic sink"),
        "queue": (QUEUE_SINK, "a queue sink"),
        "route": (TOPIC_SINK | QUEUE_SINK, "a route"),
    }
    for name, sink in pipeline.outputs.items():
        if sink.kind in sinks:  # Spark's own check their options
            with naming(sink_place(name)):
                Options(texts(sink.options)).refuse_others(*sinks[sink.kind])


@contextmanager
def naming(place: str) -> Iterator[None]:
    """What a source or sink refuses, as an error of the pipeline file."""
    try:
        yield
    except InvalidRequest as error:
        raise ConfigError(f"{place}: {error}") from None


def parse_sql(sql: str) -> exp.Expr:
    """What Spark calls window(...) is a function; to sqlglot the word begins a clause."""
    return sqlglot.parse_one(
        re.sub(r"\b((?:session_)?window)\s*\(", r"_\1(", sql, flags=re.I), dialect="spark"
    )


def aggregates(sql: str) -> bool:
    """Whether rows are brought together, which takes a shuffle."""
    nodes = parse_sql(sql).find_all(exp.Group, exp.Distinct, exp.AggFunc)
    return any(not node.find_ancestor(exp.Window) for node in nodes)


def _check_repeatable(pipeline: Pipeline) -> None:
    """As far as names tell. `penstock.pipeline.spark_plan` has Spark's word on it."""
    steps = {
        step.name: step
        for sink in pipeline.outputs.values()
        if sink.messages
        for step in _steps_of(pipeline, sink)
    }
    for step in steps.values():
        calls = parse_sql(step.sql).find_all(exp.Func) if step.sql else ()
        for call in calls:
            name = (call.name if isinstance(call, exp.Anonymous) else call.sql_name()).lower()
            if name in VARYING:
                raise ConfigError(
                    f"step {step.name}: what is written must not differ when a batch is run "
                    f"again, and {name}() would: use columns of the records instead, such as "
                    "timestamp or createdAt for the time"
                )


def _steps_of(pipeline: Pipeline, sink: Sink) -> list[Step]:
    """Those that can have made a sink's rows: none after the view it takes."""
    names = [step.name for step in pipeline.steps]
    if sink.view is None:
        return pipeline.steps
    return pipeline.steps[: names.index(sink.view) + 1] if sink.view in names else []


def _check_aggregates(pipeline: Pipeline, sink: Sink, columns: Columns | None) -> None:
    steps = _steps_of(pipeline, sink)
    grouped = [step.name for step in steps if step.sql and aggregates(step.sql)]
    if not grouped:
        return
    marked = any(source.watermark for source in pipeline.views.values())
    marked |= any(step.python for step in steps)  # a function may set one
    if pipeline.streaming and sink.mode == "append" and not marked:
        raise ConfigError(
            f"step {grouped[0]} aggregates a stream, which never ends: give the source a "
            "watermark, such as {at: 10 minutes}, and group by window(at, '1 minute'), or give the "
            "sink `mode: update`"
        )
    if (
        sink.messages
        and not sink.orderBy
        and columns is not None
        and "transactionid" not in {name.lower() for name in columns}
    ):
        raise ConfigError(UNORDERED)


def _sql_columns(step: Step, views: dict[str, Columns | None]) -> Columns | None:
    where = f"step {step.name}"
    try:
        query = parse_sql(step.sql or "")
    except ParseError as error:
        detail = error.errors[0] if error.errors else {}
        raise ConfigError(
            f"{where}: not valid SQL at line {detail.get('line')}, column {detail.get('col')}: "
            f"{detail.get('highlight')!r}. (If Spark takes it: run it with --no-check.)"
        ) from None
    if not isinstance(query, exp.Query):
        raise ConfigError(f"{where}: a step is a SELECT")
    own = {cte.alias.lower() for cte in query.find_all(exp.CTE)}
    view_names = {name.lower(): name for name in views}  # to Spark names are the same in any case
    used = set()
    for table in sorted({table.name for table in query.find_all(exp.Table) if not table.db}):
        if table.lower() in view_names:
            used.add(view_names[table.lower()])
        elif table.lower() not in own:
            raise ConfigError(
                f"{where}: there is no view {table!r} before it; there are {', '.join(views)}"
            )
    if any(views[table] is None for table in used):
        return None
    written = query.named_selects  # before names are made lower case
    if "*" not in written:
        refuse_twice([name for name in written if name], where)
    try:
        schema: dict[str, object] = {table: dict(views[table] or {}) for table in used}
        for made in {call.name for call in query.find_all(exp.Anonymous)} & WINDOWS.keys():
            for columns in schema.values():  # GROUP BY window(...) makes a column of that name
                columns[WINDOWS[made]] = "STRUCT<start: TIMESTAMP, end: TIMESTAMP>"  # type: ignore[index]
        resolved = qualify(query, schema=schema, dialect="spark", quote_identifiers=False)
    except OptimizeError as error:
        options = "; ".join(
            f"{table} has {', '.join(views[table] or ())}" for table in sorted(used)
        )
        raise ConfigError(f"{where}: {str(error).partition('.')[0]}. {options}") from None
    return dict.fromkeys(
        written if all(written) and "*" not in written else resolved.named_selects, ""
    )


def refuse_twice(names: list[str], where: str = "sink") -> None:
    """Two columns of one name would be a JSON object with a key twice: readers see either."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{where}: two columns are named {name!r}: give one of them another name with AS"
            )


def load_function(named: str, where: str) -> Callable[..., Any]:
    """The function `module:name`; ConfigError when it is not there."""
    module, _, name = named.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ConfigError(f"{where}: {module} cannot be imported: {error}") from error
    if function is None or not callable(function):
        raise ConfigError(f"{where}: {module} has no function {name!r}")
    return function


def _check_sink(name: str, sink: Sink, columns: Columns) -> None:
    for wanted, names in (("orderBy", sink.orderBy), ("partitionBy", sink.partitionBy)):
        for column in names:
            if column.lower() not in {name.lower() for name in columns}:
                raise ConfigError(
                    f"{sink_place(name)}.{wanted} names {column!r}; the rows have "
                    f"{', '.join(columns)}"
                )


def _check_queues(pipeline: Pipeline) -> None:
    for name, source in pipeline.views.items():
        if source.queue:
            postgres = Postgres(Options(texts(source_options(pipeline, source))))
            sql = "SELECT name FROM queues WHERE deleted_at IS NULL ORDER BY name"
            names = [queue for (queue,) in postgres.rows(sql)]
            if source.queue not in names:
                raise ConfigError(
                    f"source {name}: there is no queue {source.queue!r} in the database; "
                    f"queues: {', '.join(names[:10]) or 'none yet'}"
                )


def resolve_routes(pipeline: Pipeline) -> Pipeline:
    """The pipeline with routes replaced by the topic or queue they read."""
    sinks = {
        name: _resolve_route(pipeline, sink) if sink.route else sink
        for name, sink in pipeline.outputs.items()
    }
    return msgspec.structs.replace(pipeline, sink=None, sinks=sinks)


def _resolve_route(pipeline: Pipeline, sink: Sink) -> Sink:
    """The topic or queue that an export route reads, so that what Spark writes there is delivered
    with the route's own breaker, retries and dead letters."""
    assert sink.route is not None
    try:
        with BrokerCaller(pipeline.url, token=pipeline.token, timeout=5.0) as caller:
            route = caller.json("GET", resource("/api/v1/routes", sink.route))
    except NotFound:
        raise ConfigError(f"there is no export route {sink.route!r} on {pipeline.url}") from None
    except PenstockError as error:
        raise ConfigError(
            f"the broker cannot be asked for export route {sink.route!r}: {error}"
        ) from None
    source = route.get("source")  # the word "push" when there is none
    for kind in ("topic", "queue"):
        if isinstance(source, dict) and source.get(kind):
            return msgspec.structs.replace(sink, **{"route": None, kind: source[kind]})
    raise ConfigError(
        f"export route {sink.route!r} takes direct pushes only: give it a source topic, which "
        "keeps Spark's output until it is delivered"
    )


def _check_broker(pipeline: Pipeline) -> None:
    """The topics that are read must exist. A sink's topic is made when it is written to."""
    topics = [
        part.strip() for s in pipeline.views.values() if s.topic for part in s.topic.split(",")
    ]
    if not topics or any("directory" in source.options for source in pipeline.views.values()):
        return
    token = Options({"token": pipeline.token or ""}).token()
    with TopicLink(pipeline.broker, patience=3.0, token=token) as link:
        for topic in topics:
            try:
                link.info(topic)
            except NotFound:
                names = ", ".join(link.names()[:10]) or "none yet"
                raise ConfigError(
                    f"there is no topic {topic!r} on {pipeline.broker}; topics: {names}"
                ) from None
            except PenstockError as error:
                raise ConfigError(
                    f"the broker cannot be asked for topic {topic!r}: {error}"
                ) from error
