"""From a pipeline's description to Spark frames and queries. Everything a pipeline file can say is
turned into code here.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.errors import ConfigError, InvalidRequest
from penstock.pipeline.failure import step_failed
from penstock.pipeline.json_schema import dead_letters, typed
from penstock.pipeline.options import Options
from penstock.pipeline.pipeline_file import (
    DeadLetterTarget,
    Pipeline,
    Sink,
    Source,
    Step,
    source_options,
    texts,
)
from penstock.pipeline.spark_plan import refuse_unrepeatable, refuse_unsupported
from penstock.pipeline.validation import UNORDERED, load_function, refuse_twice

NODE = re.compile(
    r"^[\s:+-]*(?:\*\(\d+\) )?'?(\w+)(.*)", re.MULTILINE
)  # of a plan as Spark prints it
# Logical nodes that bring rows together, for Spark Connect, which shows a stream no physical plan.
GATHERS = re.compile(
    "Aggregate|Distinct|Deduplicate|Join|Repartition|Rebalance|GlobalLimit|Window$|Sort$|Intersect|Except"
    "|FlatMapGroups|MapGroups|TransformWithState"
)


def frames(spark: Any, pipeline: Pipeline) -> tuple[Any, dict[str, Any]]:
    """The frame the sink gets, and those of dead letters by the source they come from. Registers
    every view.
    """
    dead: dict[str, Any] = {}
    frame = None
    for name, source in pipeline.views.items():
        frame = _read(spark, pipeline, source)
        if not source.schema:
            frame = _late(frame, source, name)
        if source.format == "json" and source.schema:
            frame = _late(typed(frame, source.schema), source, name)
            if source.deadLetter:
                dead[name] = dead_letters(frame, name)
                frame = frame.where("_corrupt IS NULL")
        frame.createOrReplaceTempView(name)
    for step in pipeline.steps:
        if step.sql:
            frame = _made(step, spark.sql, step.sql)
        else:
            function: Callable[[Any], Any] = load_function(step)  # type: ignore[assignment]
            frame = _made(step, function, frame)
            if not hasattr(frame, "createOrReplaceTempView"):
                raise ConfigError(
                    f"step {step.name}: {step.python} gave {type(frame).__name__}, not a DataFrame"
                )
        frame.createOrReplaceTempView(step.name)
    return frame, dead


def _made(step: Step, make: Callable[[Any], Any], given: Any) -> Any:
    try:
        return make(given)
    except (
        Exception
    ) as error:  # whatever a user's function raises, or Spark finds wrong with the SQL
        raise step_failed(step.name, error) from error


def counted(frame: Any) -> tuple[Any, Any]:
    """The frame, and how many rows it had once it was written (`rows`)."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    observed = Observation()
    return frame.observe(observed, f.count(f.lit(1)).alias("rows")), observed


def verify(spark: Any, pipeline: Pipeline) -> list[str]:
    """All that a run does before its first batch, without a batch: ConfigError says what Spark, or
    a sink, refuses. Returns the columns the sink gets."""
    frame, dead = frames(spark, pipeline)
    places: list[tuple[Any, Sink | DeadLetterTarget]] = [(frame, pipeline.sink)]
    for name, letters in dead.items():
        if (letter := pipeline.views[name].deadLetter) is not None:
            places.append((letters, letter))
    for made, target in places:
        place = target
        if isinstance(place, Sink) and place.route:  # nobody was asked what it reads
            place = msgspec.structs.replace(place, route=None, topic=place.route)
        writer(pipeline, made, place, pipeline.app_id, pipeline.checkpoint)
        if pipeline.streaming:
            refuse_unsupported(made, place.mode if isinstance(place, Sink) else "append")
        if place.topic or place.queue:
            _verify_sink(pipeline, made, place)
    return list(frame.columns)


def _verify_sink(pipeline: Pipeline, frame: Any, place: Sink | DeadLetterTarget) -> None:
    """By the very code that will write."""
    from penstock.pipeline.sinks.queue import QueueStreamWriter, QueueWriter
    from penstock.pipeline.sinks.topic import TopicStreamWriter, TopicWriter

    sink = place if isinstance(place, Sink) else Sink(topic=place.topic, queue=place.queue)
    kinds = (QueueWriter, QueueStreamWriter) if sink.queue else (TopicWriter, TopicStreamWriter)
    options = Options(texts(_sink_options(pipeline, sink, pipeline.app_id)))
    try:
        kinds[pipeline.streaming](options, as_messages(frame, sink).schema)
    except InvalidRequest as error:
        raise ConfigError(f"sink: {error}") from None


def _late(frame: Any, source: Source, name: str) -> Any:
    from pyspark.errors import AnalysisException

    for column, delay in source.watermark.items():
        try:
            frame = frame.withWatermark(column, delay)
        except AnalysisException as error:
            raise ConfigError(f"source {name}: watermark: {str(error).partition(';')[0]}") from None
    return frame


def _read(spark: Any, pipeline: Pipeline, source: Source) -> Any:
    if source.parquet:
        return spark.read.options(**texts(source.options)).parquet(source.parquet)
    reader = (spark.readStream if pipeline.streaming else spark.read).format("penstock")
    given = source_options(pipeline, source)
    return reader.options(**texts(given)).load()


def as_messages(frame: Any, sink: Sink) -> Any:
    """What a topic or queue takes: a column payload. Rows without one become JSON of all their
    columns.
    """
    from pyspark.sql import functions as f

    refuse_twice(frame.columns)
    if "payload" in frame.columns:
        return frame
    kept = [
        name
        for name in ("queue", "partition", "transactionId", "traceId", "topic", *sink.orderBy)
        if name in frame.columns
    ]
    return frame.select(*dict.fromkeys(kept), f.to_json(f.struct("*")).alias("payload"))


def _sink_options(pipeline: Pipeline, sink: Sink, app: str) -> dict[str, Any]:
    options = {
        "appId": app,
        **({"token": pipeline.token} if pipeline.token else {}),
        **sink.options,
    }
    if sink.orderBy:
        options["orderBy"] = ",".join(sink.orderBy)
    if sink.queue:
        return {**options, "queue": sink.queue, "url": pipeline.url}
    return {**options, "topic": sink.topic, "broker": pipeline.broker}


def writer(
    pipeline: Pipeline, frame: Any, sink: Sink | DeadLetterTarget, app: str, checkpoint: str | None
) -> Any:
    """A started stream's or a batch's writer, all set but not yet running."""
    options: dict[str, Any] = {}
    if sink.topic or sink.queue:
        place = sink if isinstance(sink, Sink) else Sink(topic=sink.topic, queue=sink.queue)
        frame = as_messages(frame, place)
        options = _sink_options(pipeline, place, app)
        refuse_unrepeatable(frame)
        _refuse_unordered(frame, place)
        kind = "penstock"
    else:
        assert isinstance(sink, Sink)
        options = {"path": sink.parquet, **sink.options}
        kind = "parquet"
    if not pipeline.streaming:
        configured = frame.write.format(kind).mode("append").options(**texts(options))
    elif isinstance(sink, Sink) and sink.mode == "update":
        configured = _updating(frame, options)
    else:
        configured = frame.writeStream.format(kind).outputMode("append").options(**texts(options))
    if isinstance(sink, Sink) and sink.partitionBy:
        configured = configured.partitionBy(*sink.partitionBy)
    if pipeline.streaming:
        configured = (
            configured.queryName(app)
            .option("checkpointLocation", checkpoint)
            .trigger(**_trigger(pipeline.trigger))
        )
    return configured


def _updating(frame: Any, options: dict[str, Any]) -> Any:
    """Spark 4.3 lets no Python sink take updates, so each batch is a write of its own. A task knows
    which batch it belongs to all the same, and one that is run again is recognised."""
    if not hasattr(frame, "_jdf"):
        raise ConfigError(
            "sink.mode: update does not work over Spark Connect, which does not tell a sink "
            "its batch"
        )

    def append(batch: Any, _number: int) -> None:
        batch.write.format("penstock").mode("append").options(**texts(options)).save()

    return frame.writeStream.foreachBatch(append).outputMode("update")


def _refuse_unordered(frame: Any, sink: Sink) -> None:
    """After a shuffle rows come in any order, so a batch run again would give the same numbers to
    other rows.
    """
    if sink.orderBy or "transactionId" in frame.columns:
        return
    if not hasattr(frame, "_jdf"):  # Spark Connect
        if gathers(frame._explain_string(extended=True)):
            raise ConfigError(UNORDERED)
        return
    # A frame made by spark.sql() does not say that it is a stream until something is made of it.
    execution = frame.select("*")._jdf.queryExecution()
    mode = frame.sparkSession._jvm.org.apache.spark.sql.execution.ExplainMode.fromString("simple")
    if shuffles(execution.explainString(mode)):
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
    """The same of a plan that has its logical form only: a join may then be one that would not
    shuffle.
    """
    return any(GATHERS.search(name) for name, _ in NODE.findall(plan))


def _trigger(text: str) -> dict[str, Any]:
    return {"availableNow": True} if text == "availableNow" else {"processingTime": text}
