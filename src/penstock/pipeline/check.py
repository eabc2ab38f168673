"""Validation before Spark starts: columns, views, schemas, functions and topics, in a second instead of a JVM's start.

SQL is parsed and its columns are resolved by sqlglot in Spark's dialect, against the columns each source is known to
have. What a Python step makes of its columns cannot be known here, so nothing is said about columns after one.
"""

import importlib
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote

import msgspec
import sqlglot
from sqlglot import exp
from sqlglot.errors import OptimizeError, ParseError
from sqlglot.optimizer.qualify import qualify

from penstock.errors import ConfigError, NotFound, PenstockError
from penstock.net.tls import open_url
from penstock.pipeline.columns import QUEUE_DDL, TOPIC_DDL
from penstock.pipeline.link import TopicLink
from penstock.pipeline.options import bearer
from penstock.pipeline.spec import Pipeline, Sink, Source, Step

Columns = dict[str, str]
META = {
    "topic": ("topic", "offset", "timestamp"),
    "queue": ("queue", "partition", "seq", "id", "transactionId", "createdAt"),
}


def check(pipeline: Pipeline, *, ask_broker: bool = True) -> list[str]:
    """Raise ConfigError for what is wrong; otherwise the columns the sink will get, empty when they cannot be known."""
    views: dict[str, Columns | None] = {name: source_columns(name, source) for name, source in pipeline.views.items()}
    last = views[next(reversed(views))]
    for step in pipeline.steps:
        last = _sql_columns(step, views) if step.sql else None
        if step.python:
            load_function(step)  # it must be there; what it makes of the columns is its own affair
        views[step.name] = last
    if last is not None:
        _check_sink(pipeline, last)
    if ask_broker:
        _check_broker(pipeline)
        resolve_route(pipeline)
    return list(last or ())


def parse_schema(name: str, ddl: str) -> Columns:
    """Column names and types of a schema string; ConfigError points at what is wrong in it."""
    try:
        table = sqlglot.parse_one(f"CREATE TABLE t ({ddl})", dialect="spark").find(exp.Schema)
    except ParseError as error:
        found = error.errors[0] if error.errors else {}
        near = f" near {found['highlight']!r}" if found.get("highlight") else ""
        raise ConfigError(f"source {name}: the schema is not valid{near}: {ddl!r}") from None
    columns = {column.name: column.kind.sql("spark") for column in (table.expressions if table else []) if column.kind}
    if not columns or len(columns) != len(table.expressions if table else []):
        raise ConfigError(f"source {name}: every column of the schema has a name and a type: {ddl!r}")
    return columns


def source_columns(name: str, source: Source) -> Columns | None:
    """The columns of a source's view; None for Parquet, whose files say."""
    if source.parquet:
        return None
    plain = parse_schema(name, QUEUE_DDL if source.queue else TOPIC_DDL)
    if source.format != "json" or source.schema is None:
        return plain
    typed = parse_schema(name, source.schema)
    meta = {f"_{column}": plain[column] for column in META["queue" if source.queue else "topic"]}
    return {**typed, "_corrupt": "STRING", **meta}


def _sql_columns(step: Step, views: dict[str, Columns | None]) -> Columns | None:
    where = f"step {step.name}"
    try:
        query = sqlglot.parse_one(step.sql or "", dialect="spark")
    except ParseError as error:
        found = error.errors[0] if error.errors else {}
        raise ConfigError(
            f"{where}: not valid SQL at line {found.get('line')}, column {found.get('col')}: {found.get('highlight')!r}"
        ) from None
    if not isinstance(query, exp.Query):
        raise ConfigError(f"{where}: a step is a SELECT")
    own = {cte.alias for cte in query.find_all(exp.CTE)}
    used = {table.name for table in query.find_all(exp.Table) if not table.db} - own
    for table in sorted(used):
        if table not in views:
            known = ", ".join(views)
            raise ConfigError(f"{where}: there is no view {table!r} before it; there are {known}")
    if any(views[table] is None for table in used):
        return None
    try:
        schema: dict[str, object] = {table: views[table] for table in used}
        resolved = qualify(query, schema=schema, dialect="spark", quote_identifiers=False)
    except OptimizeError as error:
        options = "; ".join(f"{table} has {', '.join(views[table] or ())}" for table in sorted(used))
        raise ConfigError(f"{where}: {str(error).partition('.')[0]}. {options}") from None
    return dict.fromkeys(resolved.named_selects, "")


def load_function(step: Step) -> object:
    module, _, name = (step.python or "").partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ConfigError(f"step {step.name}: {module} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"step {step.name}: {module} has no function {name!r}")
    return found


def _check_sink(pipeline: Pipeline, columns: Columns) -> None:
    for wanted, names in (("orderBy", pipeline.sink.orderBy), ("partitionBy", pipeline.sink.partitionBy)):
        for name in names:
            if name not in columns:
                raise ConfigError(f"sink.{wanted} names {name!r}; the rows have {', '.join(columns)}")


def resolve_route(pipeline: Pipeline) -> Sink:
    """The sink itself; for an export route, the topic or queue it reads, so that what Spark writes there is delivered
    with the route's own breaker, retries and dead letters."""
    sink = pipeline.sink
    if not sink.route:
        return sink
    target = f"{pipeline.url.rstrip('/')}/api/v1/routes/{quote(sink.route, safe='')}"
    try:
        with open_url(urllib.request.Request(target, headers=bearer()), timeout=5) as answer:
            found = json.loads(answer.read()).get("source")  # the word "push" when there is none
    except urllib.error.HTTPError as error:
        raise ConfigError(f"there is no export route {sink.route!r} on {pipeline.url} ({error.code})") from None
    except OSError as error:
        raise ConfigError(f"the broker at {pipeline.url} cannot be asked for route {sink.route!r}: {error}") from None
    source = found if isinstance(found, dict) else {}
    topic, queue = source.get("topic"), source.get("queue")
    if not topic and not queue:
        raise ConfigError(
            f"export route {sink.route!r} takes direct pushes only: give it a source topic, which keeps Spark's output "
            "until it is delivered"
        )
    return msgspec.structs.replace(sink, route=None, topic=topic or None, queue=None if topic else queue)


def _check_broker(pipeline: Pipeline) -> None:
    """The topics that are read must exist. A sink's topic is made when it is written to."""
    topics = [part.strip() for s in pipeline.views.values() if s.topic for part in s.topic.split(",")]
    if not topics or any("directory" in source.options for source in pipeline.views.values()):
        return
    with TopicLink(pipeline.broker, patience=3.0, token=os.environ.get("PENSTOCK_TOKEN")) as link:
        for topic in topics:
            try:
                link.info(topic)
            except NotFound:
                known = ", ".join(link.names()[:10]) or "none yet"
                raise ConfigError(f"there is no topic {topic!r} on {pipeline.broker}; topics: {known}") from None
            except PenstockError as error:
                raise ConfigError(f"the broker cannot be asked for topic {topic!r}: {error}") from error
