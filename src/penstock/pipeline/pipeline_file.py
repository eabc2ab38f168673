"""A pipeline as a file: what it reads, the steps in between, where it writes. YAML, decoded
strictly.

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
from typing import Any

import msgspec
import yaml

from penstock.errors import ConfigError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAIN = "main"  # the sink of a pipeline that has one
INTERVAL = re.compile(r"\d+(\.\d+)? (milliseconds?|seconds?|minutes?|hours?)")


class DeadLetterTarget(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    topic: str | None = None
    queue: str | None = None


SOURCES = ("topic", "topicPattern", "queue", "parquet")
SINKS = ("topic", "queue", "parquet", "route", "table", "format", "foreachBatch")


def _kinds(struct: msgspec.Struct, kinds: Sequence[str]) -> list[str]:
    return [kind for kind in kinds if getattr(struct, kind)]


class Source(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a pipeline reads: one of SOURCES."""

    topic: str | None = None
    topicPattern: str | None = None  # noqa: N815
    queue: str | None = None
    parquet: str | None = None  # a directory, such as an archive
    format: str = "raw"  # or json
    schema: str | None = None  # of the JSON, as in a CREATE TABLE: "id BIGINT, at TIMESTAMP"
    deadLetter: DeadLetterTarget | None = None  # noqa: N815
    watermark: dict[str, str] = {}  # a time column and how late it may be: {at: 10 minutes}
    options: dict[str, Any] = {}

    @property
    def kind(self) -> str:
        return _kinds(self, SOURCES)[0]

    @property
    def default_name(self) -> str:
        """The view's name when none is given."""
        name = self.topic or self.queue or "source"
        return name if NAME.fullmatch(name) else "source"


class Step(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A view made by SQL, or by a function `module:name`."""

    name: str
    sql: str | None = None
    python: str | None = None


class Sink(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Where a pipeline writes: one of SINKS."""

    topic: str | None = None
    queue: str | None = None
    parquet: str | None = None
    route: str | None = None  # an export route: what goes to its source topic or queue, it delivers
    table: str | None = None  # the directory or s3:// URL of a Delta table
    format: str | None = None  # any that Spark has a writer for, with its options
    foreachBatch: str | None = None  # module:function, called with a frame and its number # noqa: N815
    view: str | None = msgspec.field(default=None, name="from")  # whose rows; the last by default
    partitionBy: list[str] = []  # noqa: N815
    orderBy: list[str] = []  # noqa: N815
    # of a stream's aggregates: append (when a window is over), or update (whenever they change)
    mode: str = "append"
    options: dict[str, Any] = {}

    @property
    def kind(self) -> str:
        return _kinds(self, SINKS)[0]

    @property
    def messages(self) -> bool:
        """Whether rows become records or messages, each exactly once."""
        return self.kind in ("topic", "queue", "route")


class Pipeline(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    source: Source | None = None
    sources: dict[str, Source] = {}
    steps: list[Step] = []
    sink: Sink | None = None
    sinks: dict[str, Sink] = {}
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
    def views(self) -> dict[str, Source]:
        """The sources under the names their views have."""
        return {**({self.source.default_name: self.source} if self.source else {}), **self.sources}

    @property
    def outputs(self) -> dict[str, Sink]:
        return {**({MAIN: self.sink} if self.sink else {}), **self.sinks}

    def app_id(self, output: str = MAIN) -> str:
        """Under which an output's rows are recognised when they come again."""
        own = self.appId or self.name
        return own if output == MAIN else f"{own}:{output}"

    @property
    def streaming(self) -> bool:
        """Whether it runs from a checkpoint, as opposed to reading all every time."""
        return self.trigger != "batch"


def load(path: Path) -> Pipeline:
    """Read a pipeline file; ConfigError names the file, the key and what was expected."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return parse(text, str(path))


def parse(text: str, where: str = "pipeline") -> Pipeline:
    """Decode and check a pipeline file's text; ConfigError as in `load`."""
    try:
        pipeline = msgspec.convert(yaml.safe_load(text), Pipeline)
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


def _mistakes(pipeline: Pipeline) -> Iterator[str]:
    """What is wrong. What comes after the first may be due to it."""
    if not pipeline.name.strip():
        yield "a pipeline has a `name`: the broker shows it under it"
    if not pipeline.views:
        yield "give a `source`, or `sources` by name"
    for name, source in pipeline.views.items():
        if len(_kinds(source, SOURCES)) != 1:
            yield f"source {name} reads one of topic, topicPattern, queue or parquet"
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
        if source.parquet and pipeline.streaming:
            yield f"source {name}: Parquet is read with `trigger: batch`"
    names = [*pipeline.views, *(step.name for step in pipeline.steps)]
    for name in names:
        if not NAME.fullmatch(name):
            yield f"{name!r} cannot be a view's name: letters, digits and underscores"
        # to Spark they are the same in any case
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
    trigger = pipeline.trigger
    if trigger not in ("availableNow", "batch") and not INTERVAL.fullmatch(trigger):
        yield (
            f"trigger is availableNow, batch or an interval such as '10 seconds', not {trigger!r}"
        )
    if pipeline.streaming and not pipeline.checkpoint:
        yield "a stream needs a `checkpoint`: a directory of its own that survives restarts"


def _sink_mistakes(name: str, sink: Sink, views: list[str], streaming: bool) -> Iterator[str]:
    where = sink_place(name)
    if not NAME.fullmatch(name) or name in ("steps", "dead"):
        yield f"{name!r} cannot be a sink's name: letters, digits and underscores"
    if len(_kinds(sink, SINKS)) != 1:
        yield f"the {where} is one of {', '.join(SINKS[:-1])} or {SINKS[-1]}"
    if sink.view is not None and sink.view not in views:
        yield f"{where}: `from` names {sink.view!r}; there are {', '.join(views)}"
    if sink.foreachBatch and ":" not in sink.foreachBatch:
        yield f"{where}: foreachBatch is module:function, not {sink.foreachBatch!r}"
    updates = sink.messages or bool(sink.foreachBatch)
    if sink.mode not in ("append", "update") or (sink.mode == "update" and not updates):
        yield f"{where}.mode is append, or for a topic, a queue or foreachBatch update"
    if sink.mode == "update" and not streaming:
        yield f"{where}.mode: update is for streams"
    if sink.partitionBy and sink.kind not in ("parquet", "format"):
        yield f"{where}.partitionBy is for parquet and format"


def sink_place(name: str) -> str:
    """How errors name a sink."""
    return "sink" if name == MAIN else f"sink {name}"


def source_options(pipeline: Pipeline, source: Source) -> dict[str, Any]:
    """The options of Spark's reader for a source."""
    given = {"group": pipeline.name, **source.options}
    if pipeline.token:
        given.setdefault("token", pipeline.token)
    if source.queue:
        # else that of this machine's broker
        database = {"database": pipeline.database} if pipeline.database else {}
        return {"queue": source.queue, **database, **given}
    if "directory" not in given:
        given.setdefault("broker", pipeline.broker)
    return {source.kind: getattr(source, source.kind), **given}


def texts(options: dict[str, Any]) -> dict[str, str]:
    """Options as Spark takes them."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
    }
