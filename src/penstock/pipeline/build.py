"""From a pipeline's description to Spark frames and queries. Everything a pipeline file can say is turned into code
here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.pipeline.check import load_function
from penstock.pipeline.spec import Pipeline, Place, Sink, Source
from penstock.pipeline.typed import dead_letters, typed

LOGICAL = ("Aggregate", "Distinct", "Deduplicate", "Join", "Repartition")  # Connect may show no physical plan
SHUFFLES = ("Exchange", "ObjectHashAggregate", "HashAggregate", "SortMergeJoin", "StateStoreSave")


def frames(spark: Any, pipeline: Pipeline) -> tuple[Any, dict[str, Any]]:
    """The frame the sink gets, and those of dead letters by the source they come from. Registers every view."""
    dead: dict[str, Any] = {}
    frame = None
    for name, source in pipeline.views.items():
        frame = _read(spark, pipeline, source)
        if source.format == "json" and source.schema:
            frame = typed(frame, source.schema)
            if source.deadLetter:
                dead[name] = dead_letters(frame, name)
                frame = frame.where("_corrupt IS NULL")
        frame.createOrReplaceTempView(name)
    for step in pipeline.steps:
        if step.sql:
            frame = spark.sql(step.sql)
        else:
            function: Callable[[Any], Any] = load_function(step)  # type: ignore[assignment]
            frame = function(frame)
            if not hasattr(frame, "createOrReplaceTempView"):
                raise ConfigError(f"step {step.name}: {step.python} gave {type(frame).__name__}, not a DataFrame")
        frame.createOrReplaceTempView(step.name)
    return frame, dead


def _read(spark: Any, pipeline: Pipeline, source: Source) -> Any:
    if source.parquet:
        return spark.read.options(**_texts(source.options)).parquet(source.parquet)
    reader = (spark.readStream if pipeline.streaming else spark.read).format("penstock")
    given = {"group": pipeline.name, **source.options}
    if source.queue:
        given = {"queue": source.queue, "database": pipeline.database, **given}
    else:
        given = {source.kind: getattr(source, source.kind), **given}
        if "directory" not in given:
            given.setdefault("broker", pipeline.broker)
    return reader.options(**_texts(given)).load()


def as_messages(frame: Any, sink: Sink) -> Any:
    """What a topic or queue takes: a column payload. Rows without one become JSON of all their columns."""
    from pyspark.sql import functions as f

    if "payload" in frame.columns:
        return frame
    kept = [
        name
        for name in ("queue", "partition", "transactionId", "traceId", "topic", *sink.orderBy)
        if name in frame.columns
    ]
    return frame.select(*dict.fromkeys(kept), f.to_json(f.struct("*")).alias("payload"))


def writer(pipeline: Pipeline, frame: Any, sink: Sink | Place, app: str, checkpoint: Path | None) -> Any:
    """A started stream's or a batch's writer, all set but not yet running."""
    options: dict[str, Any] = {}
    if sink.topic or sink.queue:
        place = sink if isinstance(sink, Sink) else Sink(topic=sink.topic, queue=sink.queue)
        frame = as_messages(frame, place)
        options = {"appId": app, **place.options}
        if place.orderBy:
            options["orderBy"] = ",".join(place.orderBy)
        if place.queue:
            options |= {"queue": place.queue, "url": pipeline.url}
        else:
            options |= {"topic": place.topic, "broker": pipeline.broker}
        _refuse_unordered(frame, place)
        kind = "penstock"
    else:
        assert isinstance(sink, Sink)
        options = {"path": sink.parquet, **sink.options}
        kind = "parquet"
    if not pipeline.streaming:
        found = frame.write.format(kind).mode("append")
    else:
        found = frame.writeStream.format(kind).queryName(app).option("checkpointLocation", str(checkpoint))
        found = found.outputMode(sink.mode if isinstance(sink, Sink) else "append")
        found = found.trigger(**_trigger(pipeline.trigger))
    if isinstance(sink, Sink) and sink.partitionBy:
        found = found.partitionBy(*sink.partitionBy)
    return found.options(**_texts(options))


def _refuse_unordered(frame: Any, sink: Sink) -> None:
    """After a shuffle rows come in any order, so a batch run again would give the same numbers to other rows."""
    if sink.orderBy or "transactionId" in frame.columns:
        return
    connected = not hasattr(frame, "_jdf")  # Spark Connect
    plan = frame._explain_string(extended=True) if connected else frame._jdf.queryExecution().toString()
    if any(word in plan for word in (LOGICAL if connected else SHUFFLES)):
        raise ConfigError(
            "the sink's rows come out of a shuffle (an aggregate, a join, a repartition), in no fixed order: name the "
            "columns that order them in sink.orderBy, so that each is written exactly once"
        )


def _trigger(text: str) -> dict[str, Any]:
    return {"availableNow": True} if text == "availableNow" else {"processingTime": text}


def _texts(options: dict[str, Any]) -> dict[str, str]:
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
