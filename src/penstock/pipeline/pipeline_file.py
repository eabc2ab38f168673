"""A pipeline file: its sources, steps and sinks. YAML, decoded strictly.

    name: big-orders
    sources:
      orders:
        topic: orders
        format: json
        schema: "id BIGINT, amount DOUBLE, at TIMESTAMP"
        deadLetter: {topic: bad}
    steps:
      - {name: big, sql: "SELECT * FROM orders WHERE amount > 100"}
      - {name: enriched, python: "shop.enrich:add_country"}
    sink: {topic: big-orders}
    trigger: 10 seconds    # or availableNow (the default: what is new, then end), or batch (all)
    checkpoint: /var/lib/shop/big-orders
    spark: {spark.sql.shuffle.partitions: 4}

A source or step is a view under its name; `source:` is short for one source, named after what it
reads. A step's SQL sees all views before it, a Python function `module:function` is given the frame
of the step (or source) before it. The sink gets the last step's rows, or those of the view that
its `from` names; rows without a column `payload` are sent to topics and queues as JSON of all their
columns. `sinks:` are several, by name; `sink:` is short for one, named `main`.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import yaml

from penstock.errors import ConfigError, InvalidRequest
from penstock.pipeline.options import (
    QueueSinkOptions,
    QueueSourceOptions,
    ReachOptions,
    SinkOptions,
    TopicSinkOptions,
    TopicSourceOptions,
    read_options,
)

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAIN = "main"  # the sink of a pipeline that has one
INTERVAL = re.compile(r"\d+(\.\d+)? (milliseconds?|seconds?|minutes?|hours?)")


class DeadLetterTarget(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    topic: str | None = None
    queue: str | None = None


STATIC = ("table", "parquet", "jdbc")  # sources that are tables, not streams
SOURCES = ("topic", "topicPattern", "queue", *STATIC)
SINKS = ("topic", "queue", "parquet", "route", "table", "postgres", "format", "foreachBatch")


class Place(msgspec.Struct):
    """What a pipeline reads or writes: one of KINDS."""

    KINDS: ClassVar[Sequence[str]]

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in self.KINDS if getattr(self, kind)]

    @property
    def kind(self) -> str:
        return self.kinds[0]

    @property
    def title(self) -> str:
        """Return its kind and name, such as "topic orders"."""
        return f"{self.kind} {getattr(self, self.kind)}"


class PipelineSource(Place, forbid_unknown_fields=True, kw_only=True):
    KINDS = SOURCES

    topic: str | None = None
    topicPattern: str | None = None  # noqa: N815
    queue: str | None = None
    parquet: str | None = None  # a directory
    table: str | None = None  # the directory or s3:// URL of a Delta table
    jdbc: str | None = None  # a JDBC URL; `options` name the table or the query
    format: str = "raw"  # or json
    schema: str | None = None  # of the JSON, as in a CREATE TABLE: "id BIGINT, at TIMESTAMP"
    columns: list[Literal["key", "partition", "headers"]] = []  # further columns of a topic
    deadLetter: DeadLetterTarget | None = None  # noqa: N815
    watermark: dict[str, str] = {}  # a time column and how late it may be: {at: 10 minutes}
    refresh: int = 1  # of a table: read it again every so many batches; 0: once per run
    options: dict[str, Any] = {}

    @property
    def static(self) -> bool:
        """Return whether it is a table, to join streams with."""
        return self.kind in STATIC

    @property
    def default_name(self) -> str:
        """Return the view's name if none is given."""
        name = self.topic or self.queue or "source"
        return name if NAME.fullmatch(name) else "source"


class PipelineStep(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A view made by SQL, or by a function `module:name`."""

    name: str
    sql: str | None = None
    python: str | None = None


class PipelineSink(Place, forbid_unknown_fields=True, kw_only=True):
    KINDS = SINKS

    topic: str | None = None
    queue: str | None = None
    parquet: str | None = None
    route: str | None = None  # an export route: what goes to its source topic or queue, it delivers
    table: str | None = None  # the directory or s3:// URL of a Delta table
    postgres: str | None = None  # a table in PostgreSQL; `options` have its `database`
    format: str | None = None  # any that Spark has a writer for, with its options
    foreachBatch: str | None = None  # module:function, called with a frame and its number # noqa: N815
    view: str | None = msgspec.field(default=None, name="from")  # whose rows; the last by default
    partitionBy: list[str] = []  # noqa: N815
    orderBy: list[str] = []  # noqa: N815
    # append; update: of a stream's aggregates, whenever they change; upsert: by `key`
    mode: str = "append"
    key: list[str] = []  # of an upsert: the columns that identify a row
    delete: str | None = None  # of an upsert: the SQL condition of rows that delete their key
    options: dict[str, Any] = {}

    @property
    def messages(self) -> bool:
        """Return whether rows become records or messages, each exactly once."""
        return self.kind in ("topic", "queue", "route")

    @property
    def output_mode(self) -> str:
        """Return which rows of an aggregate it gets: final ones, or all that changed."""
        return "append" if self.mode == "append" else "update"


class PipelineFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    source: PipelineSource | None = None
    sources: dict[str, PipelineSource] = {}
    steps: list[PipelineStep] = []
    sink: PipelineSink | None = None
    sinks: dict[str, PipelineSink] = {}
    trigger: str = "availableNow"
    checkpoint: str | None = None
    appId: str | None = None  # noqa: N815
    broker: str = "127.0.0.1:12345"  # topics, over TCP
    url: str = "http://127.0.0.1:6632"  # queues and status, over HTTP
    database: str | None = None
    # For a broker that asks for one; better given as --token or PENSTOCK_TOKEN.
    token: str | None = None
    spark: dict[str, Any] = {}

    @property
    def views(self) -> dict[str, PipelineSource]:
        """Return the sources by the names of their views."""
        return {**({self.source.default_name: self.source} if self.source else {}), **self.sources}

    @property
    def outputs(self) -> dict[str, PipelineSink]:
        return {**({MAIN: self.sink} if self.sink else {}), **self.sinks}

    def app_id(self, output: str = MAIN) -> str:
        """Return the id by which an output's repeated rows are recognised."""
        own = self.appId or self.name
        return own if output == MAIN else f"{own}:{output}"

    @property
    def streaming(self) -> bool:
        """Return whether it runs from a checkpoint, rather than reading everything each time."""
        return self.trigger != "batch"

    def view_before(self, step: PipelineStep) -> str:
        """Return the view that a Python step gets: the step before it, or the last source."""
        number = self.steps.index(step)
        return self.steps[number - 1].name if number else next(reversed(self.views))

    @property
    def static(self) -> dict[str, PipelineSource]:
        """Return the sources that are tables beside the stream."""
        return {name: source for name, source in self.views.items() if source.static}


def load(path: Path) -> PipelineFile:
    """Read a pipeline file; ConfigError names the file, the key and what was expected."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return parse(text, str(path))


def parse(text: str, where: str = "pipeline") -> PipelineFile:
    """Decode and check a pipeline file's text; ConfigError as in `load`."""
    try:
        pipeline = msgspec.convert(yaml.safe_load(text), PipelineFile)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{where}{place}: not YAML: {getattr(error, 'problem', error)}"
        ) from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    for mistake in _mistakes(pipeline):
        raise ConfigError(f"{where}: {mistake}")
    return pipeline


def _mistakes(pipeline: PipelineFile) -> Iterator[str]:
    """Yield the mistakes. Later ones may be consequences of the first."""
    if not pipeline.name.strip():
        yield "a pipeline has a `name`: the broker shows it under it"
    if not pipeline.views:
        yield "give a `source`, or `sources` by name"
    for name, source in pipeline.views.items():
        if len(source.kinds) != 1:
            yield f"source {name} reads one of {', '.join(SOURCES[:-1])} or {SOURCES[-1]}"
            continue
        if source.format not in ("raw", "json"):
            yield f"source {name}: format is raw or json, not {source.format!r}"
        if (source.format == "json") != bool(source.schema):
            yield f"source {name}: `format: json` and `schema` belong together"
        if source.deadLetter and (
            source.format != "json"
            or bool(source.deadLetter.topic) == bool(source.deadLetter.queue)
        ):
            yield f"source {name}: deadLetter is for `format: json`, and names a topic or a queue"
        if len(source.watermark) > 1 or not all(map(INTERVAL.fullmatch, source.watermark.values())):
            example = "{at: 10 minutes}"
            yield f"source {name}: watermark is one column and an interval, such as {example}"
        if source.watermark and not pipeline.streaming:
            yield f"source {name}: a watermark is for streams"
        if source.static and (source.format != "raw" or source.watermark):
            yield f"source {name}: format and watermark are for topics and queues"
        if source.columns and not (source.topic or source.topicPattern):
            yield f"source {name}: columns are for topics"
        if source.refresh < 0 or (source.refresh != 1 and not source.static):
            yield f"source {name}: refresh is a number of batches, for {', '.join(STATIC)}"
        kind, given = source_kind(pipeline, source)
        yield from _option_mistakes(f"source {name}", kind, given, streaming=pipeline.streaming)
    if pipeline.streaming and len(pipeline.static) == len(pipeline.views):
        yield "a stream reads a topic or a queue: read tables alone with `trigger: batch`"
    names = [*pipeline.views, *(step.name for step in pipeline.steps)]
    for name in names:
        if not NAME.fullmatch(name):
            yield f"{name!r} cannot be a view's name: letters, digits and underscores"
        # Spark ignores case
        if sum(name.lower() == other.lower() for other in names) > 1:
            yield f"two sources or steps are named {name}"
    for step in pipeline.steps:
        if bool(step.sql) == bool(step.python):
            yield f"step {step.name} has either `sql` or `python`"
        if step.python and ":" not in step.python:
            yield f"step {step.name}: python is module:function, not {step.python!r}"
    if not pipeline.outputs:
        yield "give a `sink`, or `sinks` by name"
    for name, sink in pipeline.outputs.items():
        yield from _sink_mistakes(name, sink, names, pipeline.streaming)
        if len(sink.kinds) == 1:
            kind, given = sink_kind(pipeline, sink, pipeline.name)
            yield from _option_mistakes(sink_place(name), kind, given)
    trigger = pipeline.trigger
    if trigger not in ("availableNow", "batch") and not INTERVAL.fullmatch(trigger):
        yield (
            f"trigger is availableNow, batch or an interval such as '10 seconds', not {trigger!r}"
        )
    if pipeline.streaming and not pipeline.checkpoint:
        yield "a stream needs a `checkpoint`: a directory of its own that survives restarts"


def _sink_mistakes(
    name: str, sink: PipelineSink, views: list[str], streaming: bool
) -> Iterator[str]:
    where = sink_place(name)
    if not NAME.fullmatch(name) or name in ("steps", "dead", "shared", "static"):
        yield f"{name!r} cannot be a sink's name: letters, digits and underscores"
    if len(sink.kinds) != 1:
        yield f"the {where} is one of {', '.join(SINKS[:-1])} or {SINKS[-1]}"
        return
    if sink.view is not None and sink.view not in views:
        yield f"{where}: `from` names {sink.view!r}; there are {', '.join(views)}"
    if sink.foreachBatch and ":" not in sink.foreachBatch:
        yield f"{where}: foreachBatch is module:function, not {sink.foreachBatch!r}"
    modes = ["append", *(["update"] if sink.messages or sink.foreachBatch else [])]
    modes += ["upsert"] if sink.kind in ("table", "postgres") else []
    if sink.mode not in modes:
        yield f"{where}.mode is {' or '.join(modes)} for {sink.kind}, not {sink.mode!r}"
    if sink.mode == "update" and not streaming:
        yield f"{where}.mode: update is for streams"
    if (sink.mode == "upsert") != bool(sink.key) or (sink.delete and not sink.key):
        yield f"{where}: `mode: upsert` and `key` belong together, and `delete` to them"
    if sink.orderBy and not (sink.messages or sink.key):
        yield f"{where}.orderBy is for topics, queues and upserts"
    if sink.partitionBy and sink.kind not in ("parquet", "format", "table"):
        yield f"{where}.partitionBy is for table, parquet and format"


def sink_place(name: str) -> str:
    """Return how errors name a sink."""
    return "sink" if name == MAIN else f"sink {name}"


def source_kind(
    pipeline: PipelineFile, source: PipelineSource
) -> tuple[type[ReachOptions] | None, dict[str, Any]]:
    """Return the struct and the values of a source's options; None if Spark itself reads it."""
    if source.static:
        return None, source.options
    given = {"group": pipeline.name, **source.options}
    if pipeline.token:
        given.setdefault("token", pipeline.token)
    if source.queue:
        # else that of this machine's broker
        database = {"database": pipeline.database} if pipeline.database else {}
        return QueueSourceOptions, {"queue": source.queue, **database, **given}
    if "directory" not in given:
        given.setdefault("broker", pipeline.broker)
    return TopicSourceOptions, {source.kind: getattr(source, source.kind), **given}


def sink_kind(
    pipeline: PipelineFile, sink: PipelineSink, app: str
) -> tuple[type[SinkOptions] | None, dict[str, Any]]:
    """Return the struct and the values of a sink's options; None if Spark itself writes it."""
    if not (sink.topic or sink.queue):
        return None, sink.options
    options = {"appId": app, "url": pipeline.url, "broker": pipeline.broker}
    if pipeline.token:
        options["token"] = pipeline.token
    options |= sink.options
    if sink.orderBy:
        options["orderBy"] = ",".join(sink.orderBy)
    if sink.queue:
        return QueueSinkOptions, {**options, "queue": sink.queue}
    return TopicSinkOptions, {**options, "topic": sink.topic}


def _option_mistakes(
    where: str, kind: type[ReachOptions] | None, given: dict[str, Any], *, streaming: bool = False
) -> Iterator[str]:
    """Yield mistakes in options, checked by the code that parses them for Spark."""
    try:
        options = read_options(kind, given) if kind is not None else None
        if streaming and isinstance(options, TopicSourceOptions):
            options.refuse_end()
    except InvalidRequest as error:
        yield f"{where}: {error}"
