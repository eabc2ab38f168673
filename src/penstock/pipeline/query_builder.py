"""Build Spark's frames and queries from a pipeline's description. A run and its validation both use
`build`: it makes everything that comes before the first batch, and rejects what cannot run.

Usually each sink has a query of its own. If several sinks share a step, or a stream is joined with
tables that are read again, one query computes a batch up to that point (its `cut`) and keeps it in
memory. The steps after the cut, and each sink in turn, use that batch. Each sink recognizes a
repeated batch, so each writes exactly once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import Observation
from pyspark.sql import functions as f

from penstock.errors import ConfigError
from penstock.pipeline.failure import PipelineFailed, cause, step_failed
from penstock.pipeline.json_schema import dead_letters, typed
from penstock.pipeline.options import texts
from penstock.pipeline.pipeline_file import (
    PipelineFile,
    PipelineSink,
    PipelineSource,
    sink_kind,
    sink_place,
    source_kind,
)
from penstock.pipeline.source_columns import ALL_TOPIC_COLUMNS, CORRUPT, META, TOPIC_COLUMNS, ddl
from penstock.pipeline.sources.data_source import PenstockSource
from penstock.pipeline.spark_plan import (
    inputs_of,
    is_unordered,
    refuse_unrepeatable,
    refuse_unsupported,
    stateful_nodes,
    warn_of_float_sums,
)
from penstock.pipeline.step_history import CheckpointFiles, ancestors
from penstock.pipeline.validation import load_function, naming

DEAD = "dead"  # before the source's name, in the name of an output
SHARED = "shared"  # before the view's name, in the name of a query that several sinks share
BATCH_FORMATS = {"jdbc"}  # of Spark's, those without a streaming writer
UNORDERED = (
    "the sink's rows come out of a shuffle (an aggregate, a join, a repartition), in no fixed "
    "order: name the columns that order them in sink.orderBy, so that each is written exactly once"
)
ReadSource = Callable[[str, PipelineSource], Any]
WriteBatch = Callable[[Any, int], None]


@dataclass
class Frames:
    """The frames of a pipeline."""

    views: dict[str, Any] = field(default_factory=dict)  # sources and steps, in their order
    dead: dict[str, Any] = field(default_factory=dict)  # dead letters, by their source


def frames(spark: Any, pipeline: PipelineFile, read: ReadSource | None = None) -> Frames:
    """Return all frames, each registered as a view. `read` makes those of sources."""
    made = Frames()
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
    add_steps(spark, pipeline, made)
    return made


def add_steps(
    spark: Any, pipeline: PipelineFile, made: Frames, only: Sequence[str] | None = None
) -> None:
    """Make the frames of the steps, or of some of them, each registered as a view."""
    for step in pipeline.steps:
        if only is not None and step.name not in only:
            continue
        where = f"step {step.name}"
        try:
            if step.sql:
                frame = spark.sql(step.sql)
            else:
                function = load_function(step.python or "", where)
                frame = function(made.views[pipeline.view_before(step)])
        except ConfigError:
            raise
        # any error of a user's function, or of Spark's about the SQL
        except Exception as error:
            raise step_failed(step.name, error) from error
        if not hasattr(frame, "createOrReplaceTempView"):
            raise ConfigError(
                f"{where}: {step.python} gave {type(frame).__name__}, not a DataFrame"
            )
        frame.createOrReplaceTempView(step.name)
        made.views[step.name] = frame


def counted(frame: Any) -> tuple[Any, Any]:
    """Return the frame, and an observation that counts the rows written (`rows`)."""
    observed = Observation()
    return frame.observe(observed, f.count(f.lit(1)).alias("rows")), observed


@dataclass(frozen=True)
class SinkOutput:
    """A sink, or the dead letters of a source, with the rows it gets."""

    name: str
    view: str  # "" for dead letters
    frame: Any
    sink: PipelineSink
    app: str

    @property
    def title(self) -> str:
        """Return the name of the sink in errors."""
        kind, _, source = self.name.partition(":")
        return f"dead letters of {source}" if kind == DEAD else f"sink {self.name}"

    @property
    def checkpoint(self) -> str:
        """Return the name of its directory in the pipeline's checkpoint."""
        return self.name.replace(":", "-")

    @property
    def own_writer(self) -> bool:
        """Return whether Spark's streaming writer is used, instead of a write for each batch. Spark
        4.3 lets no Python sink take updates. A task knows its batch either way.
        """
        sink = self.sink
        if sink.messages:
            return sink.mode == "append"
        return sink.kind in ("parquet", "format") and sink.format not in BATCH_FORMATS

    @property
    def repeats(self) -> bool:
        """Return whether a batch may be written again, because the sink recognizes it."""
        return self.sink.kind not in ("parquet", "format")


@dataclass(frozen=True)
class Query:
    """One of a pipeline's streams, and the outputs that it writes."""

    name: str  # of its directory in the checkpoint
    pipeline: PipelineFile
    outputs: list[SinkOutput]
    # the view up to which the stream itself computes; None: Spark's streaming writer is used
    cut: str | None = None
    frame: Any = None  # of the cut
    behind: list[str] = field(default_factory=list)  # the steps that are done with each batch
    tables: dict[str, "JoinedTable"] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return ", ".join(output.title for output in self.outputs)

    def writer(self, checkpoint: str) -> Any:
        """Return the stream's writer with all its settings: `start` runs it."""
        p, (first, *_) = self.pipeline, self.outputs
        if self.cut is None:
            kind, options, rows = _format(p, first, first.frame)
            configured = rows.writeStream.format(kind).options(**texts(options))
            if first.sink.partitionBy:
                configured = configured.partitionBy(*first.sink.partitionBy)
        else:
            if not hasattr(self.frame, "_jdf"):
                raise ConfigError(
                    f"{first.title}: {first.sink.kind} with `mode: {first.sink.mode}` does not "
                    "work over Spark Connect, which does not tell a sink its batch"
                )
            writers = [(output, batch_writer(p, output)) for output in self.outputs]
            configured = self.frame.writeStream.foreachBatch(partial(self._write_all, writers))
        configured = configured.outputMode(first.sink.output_mode)
        configured = configured.queryName(first.app).option("checkpointLocation", checkpoint)
        if p.trigger == "availableNow":
            return configured.trigger(availableNow=True)
        return configured.trigger(processingTime=p.trigger)

    def _write_all(
        self, writers: list[tuple[SinkOutput, WriteBatch]], batch: Any, number: int
    ) -> None:
        """Make the views behind the cut of one batch, and write it to all sinks."""
        session = batch.sparkSession
        if self.behind or len(writers) > 1:
            batch.persist()
        try:
            made = Frames()
            for name, table in self.tables.items():
                made.views[name] = table.at(session, number)
            made.views[self.cut or ""] = batch
            for name, frame in made.views.items():
                frame.createOrReplaceTempView(name)
            add_steps(session, self.pipeline, made, self.behind)
            for output, write in writers:
                try:
                    write(made.views[output.view], number)
                except Exception as error:  # whatever a sink raises
                    raise PipelineFailed(f"{output.title}: {cause(error)}") from error
        finally:
            batch.unpersist()


class JoinedTable:
    """A table beside the stream, read again every so many batches."""

    def __init__(self, pipeline: PipelineFile, source: PipelineSource) -> None:
        self._pipeline, self._source = pipeline, source
        self._frame: Any = None
        self._read = 0  # the batch for which it was read

    def at(self, session: Any, number: int) -> Any:
        every = self._source.refresh
        if self._frame is None or (every and number - self._read >= every):
            if self._frame is not None:
                self._frame.unpersist()
            self._frame, self._read = read_source(session, self._pipeline, self._source), number
        return self._frame


@dataclass(frozen=True)
class Built:
    """A pipeline up to its first batch."""

    frames: Frames
    outputs: list[SinkOutput]
    queries: list[Query]  # of a stream
    inputs: dict[str, list[str]]  # the views that each step reads

    @property
    def columns(self) -> list[str]:
        """Return the columns that the first sink gets."""
        return list(self.outputs[0].frame.columns)


def build(spark: Any, pipeline: PipelineFile) -> Built:
    """Prepare a run up to its first batch. Raise ConfigError for what Spark or a sink rejects."""
    made = frames(spark, pipeline)
    outputs = _outputs(pipeline, made)
    for output in outputs:
        verify_output(pipeline, output)
        batch_writer(pipeline, output)  # refuses wrong options
    inputs = inputs_of(spark, pipeline)
    sharing = Sharing(spark, pipeline, made, inputs)
    queries = _queries(outputs, sharing) if pipeline.streaming else []
    for query in queries:
        query.writer(pipeline.checkpoint or "")
    return Built(made, outputs, queries, inputs)


def _outputs(pipeline: PipelineFile, made: Frames) -> list[SinkOutput]:
    """Return the sinks in their order, then the dead letters."""
    places = []
    for name, sink in pipeline.outputs.items():
        view = sink.view or next(reversed(made.views))
        places.append((name, view, made.views[view], sink))
    for name, letters in made.dead.items():
        target = pipeline.views[name].deadLetter
        assert target is not None
        sink = PipelineSink(topic=target.topic, queue=target.queue)
        places.append((f"{DEAD}:{name}", "", letters, sink))
    return [SinkOutput(*place, pipeline.app_id(place[0])) for place in places]


@dataclass(frozen=True)
class Sharing:
    """Which outputs can be written from the batches of one stream."""

    spark: Any
    pipeline: PipelineFile
    frames: Frames
    inputs: dict[str, list[str]]  # the views that each step reads

    def groups(self, outputs: list[SinkOutput]) -> list[Query]:
        """Return the queries of sinks that share a step, the largest groups first, and of sinks
        that need tables to be read again.
        """
        queries: list[Query] = []
        if not hasattr(self.spark, "_jvm"):
            return queries
        streams = [name for name in self.frames.views if name not in self.pipeline.static]
        state = {name: stateful_nodes(frame) for name, frame in self.frames.views.items()}
        while True:
            best: tuple[str, list[SinkOutput]] = ("", [])
            for cut in reversed(streams):
                for mode in ("append", "update"):
                    joined = [
                        one
                        for one in outputs
                        if one.sink.output_mode == mode and self._follows(one, cut, state)
                    ]
                    if len(joined) > len(best[1]) and self._worthwhile(joined, cut):
                        best = cut, joined
            if not best[1]:
                return queries
            queries.append(self._query(*best))
            outputs = [one for one in outputs if one not in best[1]]

    def refreshed(self, view: str, cut: str | None = None) -> set[str]:
        """Return the tables behind the cut that are read again while the stream runs."""
        tables = self.pipeline.static
        return {
            name
            for name in ancestors(view, self.inputs, cut)
            if name in tables and tables[name].refresh
        }

    def _follows(self, output: SinkOutput, cut: str, state: dict[str, int]) -> bool:
        """Return whether the output's rows are made only of the cut's batches and of tables."""
        if not output.view or not output.repeats or self.refreshed(cut):
            return False
        reached = ancestors(output.view, self.inputs, cut)
        sources = reached - self.inputs.keys() - self.pipeline.static.keys() - {cut}
        return cut in reached and not sources and state[cut] == state[output.view]

    def _worthwhile(self, outputs: list[SinkOutput], cut: str) -> bool:
        if any(self.refreshed(output.view, cut) for output in outputs):
            return True
        if len(outputs) < 2 or cut not in self.inputs:
            return False
        # A sink that has a checkpoint of its own continues from it.
        files = CheckpointFiles(self.spark, (self.pipeline.checkpoint or "").rstrip("/"))
        return not any(files.exists(output.checkpoint) for output in outputs)

    def _query(self, cut: str, outputs: list[SinkOutput]) -> Query:
        views = set().union(*(ancestors(one.view, self.inputs, cut) for one in outputs))
        shared = f"{SHARED}-{cut}-{outputs[0].sink.output_mode}"
        tables = {name: one for name, one in self.pipeline.static.items() if name in views}
        return Query(
            *(shared if len(outputs) > 1 else outputs[0].checkpoint, self.pipeline, outputs, cut),
            frame=self.frames.views[cut],
            behind=[step for step in self.inputs if step in views and step != cut],
            tables={name: JoinedTable(self.pipeline, source) for name, source in tables.items()},
        )


def _queries(outputs: list[SinkOutput], sharing: Sharing) -> list[Query]:
    """Return a query for each output that shares none, in the order of the outputs."""
    queries = {output.name: query for query in sharing.groups(outputs) for output in query.outputs}
    for output in outputs:
        if output.name in queries:
            continue
        if output.view and (again := sharing.refreshed(output.view)):
            raise ConfigError(
                f"source {', '.join(sorted(again))} is read again while the stream runs, which "
                f"{output.title} does not allow: a step behind the join keeps state, or the sink "
                "is parquet or format, or this is Spark Connect. Set `refresh: 0` to read the "
                "table once per run"
            )
        cut = None if output.own_writer else output.view
        queries[output.name] = Query(
            output.checkpoint, sharing.pipeline, [output], cut, output.frame
        )
    return list({id(query): query for one in outputs if (query := queries[one.name])}.values())


def verify_output(pipeline: PipelineFile, output: SinkOutput) -> None:
    """Check that the output can be written, and that a batch can be repeated."""
    frame, sink = output.frame, output.sink
    place = sink_place(output.name)
    lower = {name.lower() for name in frame.columns}
    for wanted in ("orderBy", "partitionBy", "key"):
        for column in getattr(sink, wanted):
            if column.lower() not in lower:
                raise ConfigError(
                    f"{place}.{wanted} names {column!r}; the rows have {', '.join(frame.columns)}"
                )
    if sink.messages:
        _verify_messages(pipeline, output, place)
    if pipeline.streaming:
        refuse_unsupported(frame, sink.output_mode)


def _verify_messages(pipeline: PipelineFile, output: SinkOutput, place: str) -> None:
    frame, sink = output.frame, output.sink
    refuse_unrepeatable(frame)
    warn_of_float_sums(frame)
    _, options, rows = _format(pipeline, output, frame)
    if not sink.orderBy and "transactionId" not in rows.columns and is_unordered(rows):
        raise ConfigError(UNORDERED)
    source = PenstockSource({name.lower(): text for name, text in texts(options).items()})
    with naming(place):
        (source.streamWriter if pipeline.streaming else source.writer)(rows.schema, False)


def _late(frame: Any, source: PipelineSource, name: str) -> Any:
    for column, delay in source.watermark.items():
        try:
            frame = frame.withWatermark(column, delay)
        except AnalysisException as error:
            raise ConfigError(f"source {name}: watermark: {str(error).partition(';')[0]}") from None
    return frame


def read_source(spark: Any, pipeline: PipelineFile, source: PipelineSource) -> Any:
    """Return the frame of a source: a stream or a table."""
    if source.table:
        from penstock.pipeline.lake.frames import delta_frame

        return delta_frame(spark, source.table, texts(source.options))
    if source.static:
        reader = spark.read.format(source.kind).options(**texts(source.options))
        if source.jdbc:
            frame = reader.option("url", source.jdbc).load()
            return (
                frame if source.refresh == 1 else frame.persist()
            )  # otherwise each batch would ask again
        return reader.load(source.parquet)
    reader = spark.readStream if pipeline.streaming else spark.read
    if source.columns:
        fields = [*TOPIC_COLUMNS.names, *source.columns]
        reader = reader.schema(ddl(pa.schema([ALL_TOPIC_COLUMNS.field(name) for name in fields])))
    return reader.format("penstock").options(**texts(source_kind(pipeline, source)[1])).load()


def as_messages(frame: Any, sink: PipelineSink) -> Any:
    """Return rows for a topic or queue: their column payload, or else JSON of all columns."""
    refuse_twice(frame.columns)
    if "payload" in frame.columns:
        return frame
    names = ("queue", "partition", "transactionId", "traceId", "topic", "key", "headers")
    kept = dict.fromkeys(name for name in (*names, *sink.orderBy) if name in frame.columns)
    return frame.select(*kept, f.to_json(f.struct(*_own_columns(frame.columns))).alias("payload"))


def refuse_twice(names: list[str]) -> None:
    """Reject two columns of one name: a JSON object would have the key twice."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"sink: two columns are named {name!r}: give one of them another name with AS"
            )


def _own_columns(names: list[str]) -> list[Any]:
    """Return the columns that become a payload. If all columns of a JSON source were selected, the
    origin of a record is included only for records that do not fit, since JSON leaves nulls out.
    """
    origins = [{f"_{name}" for name in kind} for kind in META.values()]
    origin = next((one for one in origins if {CORRUPT, *one} <= set(names)), set())
    columns = {name: f.col(f"`{name}`") for name in names}
    return [
        f.when(columns[CORRUPT].isNotNull(), column).alias(name) if name in origin else column
        for name, column in columns.items()
    ]


def _format(
    pipeline: PipelineFile, output: SinkOutput, frame: Any
) -> tuple[str, dict[str, Any], Any]:
    """Return Spark's name of a sink's format, its options, and the rows as it takes them."""
    sink = output.sink
    if sink.messages:
        return "penstock", sink_kind(pipeline, sink, output.app)[1], as_messages(frame, sink)
    options = {"path": sink.parquet, **sink.options} if sink.parquet else sink.options
    return sink.format or "parquet", options, frame


def batch_writer(pipeline: PipelineFile, output: SinkOutput) -> WriteBatch:
    """Return a function that writes one batch, given its rows and its number."""
    sink = output.sink
    if sink.foreachBatch:
        function: WriteBatch = load_function(sink.foreachBatch, sink_place(output.name))
        return function
    if sink.table:
        from penstock.pipeline.sinks.table import TableSink

        return TableSink(sink, output.app)
    if sink.postgres:
        from penstock.pipeline.sinks.postgres import PostgresSink

        return PostgresSink(sink, output.app)

    def append(batch: Any, _number: int) -> None:
        kind, options, rows = _format(pipeline, output, batch)
        configured = rows.write.format(kind).mode("append").options(**texts(options))
        (configured.partitionBy(*sink.partitionBy) if sink.partitionBy else configured).save()

    return append
