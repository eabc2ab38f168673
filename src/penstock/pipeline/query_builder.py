"""From a pipeline's description to Spark frames and queries. Everything a pipeline file can say is
turned into code here.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pyspark.errors import AnalysisException
from pyspark.sql import Observation
from pyspark.sql import functions as f

from penstock.errors import ConfigError
from penstock.pipeline.failure import step_failed
from penstock.pipeline.json_schema import dead_letters, typed
from penstock.pipeline.options import Options
from penstock.pipeline.pipeline_file import Pipeline, Sink, Source, source_options, texts
from penstock.pipeline.source_columns import CORRUPT, META
from penstock.pipeline.spark_plan import (
    refuse_unrepeatable,
    refuse_unsupported,
    warn_of_float_sums,
)
from penstock.pipeline.validation import UNORDERED, load_function, naming, refuse_twice

# Of a plan as Spark prints it.
NODE = re.compile(r"^[\s:+-]*(?:\*\(\d+\) )?'?(\w+)(.*)", re.MULTILINE)
DEAD = "dead"  # before the source's name, in the name of an output
BATCH_FORMATS = {"jdbc"}  # of Spark's, those without a streaming writer
# Logical nodes that bring rows together, for Spark Connect, which shows a stream no physical plan.
GATHERS = re.compile(
    "Aggregate|Distinct|Deduplicate|Join|Repartition|Rebalance|GlobalLimit|Window$|Sort$|Intersect|Except"
    "|FlatMapGroups|MapGroups|TransformWithState"
)


@dataclass
class Frames:
    """What a pipeline is made of."""

    views: dict[str, Any] = field(default_factory=dict)  # sources and steps, in their order
    dead: dict[str, Any] = field(default_factory=dict)  # dead letters, by their source

    def of(self, sink: Sink) -> Any:
        return self.views[sink.view or next(reversed(self.views))]


def frames(
    spark: Any, pipeline: Pipeline, read: Callable[[str, Source], Any] | None = None
) -> Frames:
    """All frames, each registered as a view. `read` makes those of sources."""
    made = Frames()
    frame = None
    for name, source in pipeline.views.items():
        frame = read(name, source) if read else read_source(spark, pipeline, source)
        if not source.schema:
            frame = _late(frame, source, name)
        if source.format == "json" and source.schema:
            frame = _late(typed(frame, source.schema), source, name)
            if source.deadLetter:
                made.dead[name] = dead_letters(frame, name)
                frame = frame.where("_corrupt IS NULL")
        frame.createOrReplaceTempView(name)
        made.views[name] = frame
    for step in pipeline.steps:
        where = f"step {step.name}"
        make = spark.sql if step.sql else load_function(step.python or "", where)
        try:
            frame = make(step.sql or frame)
        # whatever a user's function raises, or Spark finds wrong with the SQL
        except Exception as error:
            raise step_failed(step.name, error) from error
        if not hasattr(frame, "createOrReplaceTempView"):
            raise ConfigError(
                f"{where}: {step.python} gave {type(frame).__name__}, not a DataFrame"
            )
        frame.createOrReplaceTempView(step.name)
        made.views[step.name] = frame
    return made


def counted(frame: Any) -> tuple[Any, Any]:
    """The frame, and how many rows it had once it was written (`rows`)."""
    observed = Observation()
    return frame.observe(observed, f.count(f.lit(1)).alias("rows")), observed


def verify(spark: Any, pipeline: Pipeline) -> list[str]:
    """All that a run does before its first batch, without a batch: ConfigError says what Spark, or
    a sink, refuses. Returns the columns the first sink gets."""
    made = frames(spark, pipeline)
    for output in outputs(pipeline, made):
        sink = output.sink
        if sink.route:  # nobody was asked what it reads
            sink = msgspec.structs.replace(sink, route=None, topic=sink.route)
        writer(pipeline, output.frame, sink, output.app, pipeline.checkpoint)
        if pipeline.streaming:
            refuse_unsupported(output.frame, sink.mode)
        if sink.messages:
            _verify_sink(pipeline, output.frame, sink)
    return list(made.of(next(iter(pipeline.outputs.values()))).columns)


@dataclass(frozen=True)
class Output:
    name: str  # of the sink, or of the dead letters' source
    frame: Any
    sink: Sink
    app: str

    @property
    def title(self) -> str:
        """What errors call it."""
        kind, _, source = self.name.partition(":")
        return f"dead letters of {source}" if kind == DEAD else f"sink {self.name}"

    @property
    def checkpoint(self) -> str:
        """The name of its directory in the pipeline's checkpoint."""
        return self.name.replace(":", "-")


def outputs(pipeline: Pipeline, made: Frames) -> list[Output]:
    """The sinks in their order, then the dead letters."""
    places = [(name, made.of(sink), sink) for name, sink in pipeline.outputs.items()]
    for name, letters in made.dead.items():
        target = pipeline.views[name].deadLetter
        assert target is not None
        places.append((f"{DEAD}:{name}", letters, Sink(topic=target.topic, queue=target.queue)))
    return [Output(name, frame, sink, pipeline.app_id(name)) for name, frame, sink in places]


def _verify_sink(pipeline: Pipeline, frame: Any, sink: Sink) -> None:
    """By the very code that will write."""
    from penstock.pipeline.sinks.queue import QueueWriter
    from penstock.pipeline.sinks.topic import TopicWriter

    kind = QueueWriter if sink.queue else TopicWriter
    options = Options(texts(_sink_options(pipeline, sink, pipeline.app_id())))
    with naming("sink"):
        kind(options, as_messages(frame, sink).schema, streaming=pipeline.streaming)


def _late(frame: Any, source: Source, name: str) -> Any:
    for column, delay in source.watermark.items():
        try:
            frame = frame.withWatermark(column, delay)
        except AnalysisException as error:
            raise ConfigError(f"source {name}: watermark: {str(error).partition(';')[0]}") from None
    return frame


def read_source(spark: Any, pipeline: Pipeline, source: Source) -> Any:
    if source.parquet:
        return spark.read.options(**texts(source.options)).parquet(source.parquet)
    reader = spark.readStream if pipeline.streaming else spark.read
    return reader.format("penstock").options(**texts(source_options(pipeline, source))).load()


def as_messages(frame: Any, sink: Sink) -> Any:
    """What a topic or queue takes: a column payload; without one, JSON of all columns."""
    refuse_twice(frame.columns)
    if "payload" in frame.columns:
        return frame
    names = ("queue", "partition", "transactionId", "traceId", "topic", *sink.orderBy)
    kept = dict.fromkeys(name for name in names if name in frame.columns)
    return frame.select(*kept, f.to_json(f.struct(*_own_columns(frame.columns))).alias("payload"))


def _own_columns(names: list[str]) -> list[Any]:
    """The columns of a payload. Of a JSON source whose columns were all selected, those that say
    where a record came from are for records that did not fit: JSON leaves nulls out."""
    origins = [{f"_{name}" for name in kind} for kind in META.values()]
    origin = next((one for one in origins if {CORRUPT, *one} <= set(names)), set())
    columns = {name: f.col(f"`{name}`") for name in names}
    return [
        f.when(columns[CORRUPT].isNotNull(), column).alias(name) if name in origin else column
        for name, column in columns.items()
    ]


def _sink_options(pipeline: Pipeline, sink: Sink, app: str) -> dict[str, Any]:
    options = {"appId": app}
    if pipeline.token:
        options["token"] = pipeline.token
    options |= sink.options
    if sink.orderBy:
        options["orderBy"] = ",".join(sink.orderBy)
    if sink.queue:
        return {**options, "queue": sink.queue, "url": pipeline.url}
    return {**options, "topic": sink.topic, "broker": pipeline.broker}


def writer(pipeline: Pipeline, frame: Any, sink: Sink, app: str, checkpoint: str | None) -> Any:
    """A stream's or a batch's writer, all set but not yet running: `start` or `save` runs it."""
    options: dict[str, Any] = dict(sink.options)
    kind = sink.format or "parquet"
    if sink.messages:
        frame = as_messages(frame, sink)
        options = _sink_options(pipeline, sink, app)
        refuse_unrepeatable(frame)
        warn_of_float_sums(frame)
        _refuse_unordered(frame, sink)
        kind = "penstock"
    elif sink.parquet:
        options = {"path": sink.parquet, **options}
    by_batch = _by_batch(sink, kind, options, app)
    if not pipeline.streaming:
        if by_batch is not None:
            return BatchCall(frame, by_batch)
        configured = frame.write.format(kind).mode("append").options(**texts(options))
    elif by_batch is not None:
        if sink.messages and not hasattr(frame, "_jdf"):
            raise ConfigError(
                "sink.mode: update does not work over Spark Connect, which does not tell a sink "
                "its batch"
            )
        configured = frame.writeStream.foreachBatch(by_batch).outputMode(sink.mode)
    else:
        configured = frame.writeStream.format(kind).outputMode("append").options(**texts(options))
    if sink.partitionBy and by_batch is None:
        configured = configured.partitionBy(*sink.partitionBy)
    if pipeline.streaming:
        at = pipeline.trigger
        trigger = {"availableNow": True} if at == "availableNow" else {"processingTime": at}
        configured = configured.queryName(app).option("checkpointLocation", checkpoint)
        configured = configured.trigger(**trigger)
    return configured


@dataclass(frozen=True)
class BatchCall:
    """A writer of a batch whose sink is a function."""

    frame: Any
    function: Callable[[Any, int], None]

    def save(self) -> None:
        self.function(self.frame, 0)


def _by_batch(
    sink: Sink, kind: str, options: dict[str, Any], app: str
) -> Callable[[Any, int], None] | None:
    """What writes a batch, for sinks without a streaming writer; None for the others."""
    if sink.foreachBatch:
        return load_function(sink.foreachBatch, "sink")
    if sink.table:
        from penstock.pipeline.sinks.table import TableSink

        return TableSink(sink.table, app, options)
    # Spark 4.3 lets no Python sink take updates, so each batch is a write of its own. A task knows
    # which batch it belongs to all the same, and one that is run again is recognised.
    if kind not in BATCH_FORMATS and sink.mode != "update":
        return None

    def append(batch: Any, _number: int) -> None:
        batch.write.format(kind).mode("append").options(**texts(options)).save()

    return append


def _refuse_unordered(frame: Any, sink: Sink) -> None:
    """After a shuffle rows come in any order: run again, others would have the same numbers."""
    if sink.orderBy or "transactionId" in frame.columns:
        return
    if hasattr(frame, "_jdf"):
        # A frame made by spark.sql() does not say that it is a stream until something is made of it
        execution = frame.select("*")._jdf.queryExecution()
        modes = frame.sparkSession._jvm.org.apache.spark.sql.execution.ExplainMode
        unordered = shuffles(execution.explainString(modes.fromString("simple")))
    else:  # Spark Connect
        unordered = gathers(frame._explain_string(extended=True))
    if unordered:
        raise ConfigError(UNORDERED)


def shuffles(plan: str) -> bool:
    """Whether a physical plan moves rows between tasks, or gives them in the order of a hash table.
    A table that is broadcast to be joined with leaves the other side's rows where they are."""
    return any(
        (name.endswith("Exchange") and "BroadcastExchange" not in name + rest)
        or name.endswith("Aggregate")
        for name, rest in NODE.findall(plan)
    )


def gathers(plan: str) -> bool:
    """The same of a logical plan, where a join may be one that would not shuffle."""
    return any(GATHERS.search(name) for name, _ in NODE.findall(plan))
