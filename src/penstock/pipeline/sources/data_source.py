"""The data source Spark knows as `penstock`: hands over to the topic or the queue side, by the
options given.
"""

from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from penstock.errors import InvalidRequest, PenstockError
from penstock.pipeline.options import QUEUE_SINK, QUEUE_SOURCE, TOPIC_SINK, TOPIC_SOURCE, Options
from penstock.pipeline.plain_errors import plain_errors
from penstock.pipeline.session import activate
from penstock.pipeline.source_columns import QUEUE_DDL, TOPIC_DDL


@plain_errors
class PenstockSource(DataSource):
    """Topics and queues as tables and streams. See docs/reference/pipelines.md for the options."""

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return "penstock"

    def _of_queue(self, schema: StructType | None = None) -> bool:
        """Whether the queue side is meant: by the option `queue`, or for a sink by a column of that
        name.
        """
        options = Options(self.options)
        queue = options.text("queue", "assign")
        topic = options.text("topic", "topics", "subscribe", "topicPattern", "subscribePattern")
        if queue and topic:
            raise InvalidRequest("give the option 'queue' or 'topic', not both")
        return bool(queue) or (not topic and schema is not None and "queue" in schema.fieldNames())

    def _source_options(self) -> tuple[Options, bool]:
        """The options of a source, none of them misspelt, and whether it is a queue's."""
        options, queue = Options(self.options), self._of_queue()
        known = (QUEUE_SOURCE, "a queue source") if queue else (TOPIC_SOURCE, "a topic source")
        options.refuse_others(*known)
        return options, queue

    def _sink_options(self, schema: StructType, overwrite: bool) -> tuple[Options, bool]:
        """The same of a sink."""
        _append_only(overwrite)
        options, queue = Options(self.options), self._of_queue(schema)
        options.refuse_others(
            *((QUEUE_SINK, "a queue sink") if queue else (TOPIC_SINK, "a topic sink"))
        )
        return options, queue

    def schema(self) -> str:
        """The columns of a queue or a topic."""
        return QUEUE_DDL if self._of_queue() else TOPIC_DDL

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        options, queue = self._source_options()
        if queue:
            from penstock.pipeline.sources.queue import QueueOptions, QueueReader

            return QueueReader(QueueOptions(options, schema.fieldNames(), streaming=False))
        from penstock.pipeline.sources.topic import TopicOptions, TopicReader

        return TopicReader(TopicOptions(options, schema.fieldNames()))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """For `spark.readStream`."""
        try:
            return self._stream_reader(schema)
        except PenstockError as error:
            return RefusedStream(error)

    def _stream_reader(self, schema: StructType) -> DataSourceStreamReader:
        options, queue = self._source_options()
        if queue:
            from penstock.pipeline.sources.queue import QueueOptions, QueueStreamReader

            return QueueStreamReader(QueueOptions(options, schema.fieldNames(), streaming=True))
        from penstock.pipeline.sources.topic import TopicOptions, TopicStreamReader

        return TopicStreamReader(TopicOptions(options, schema.fieldNames()))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """For `df.write`; appends only."""
        options, queue = self._sink_options(schema, overwrite)
        if queue:
            from penstock.pipeline.sinks.queue import QueueWriter

            return QueueWriter(options, schema)
        from penstock.pipeline.sinks.topic import TopicWriter

        return TopicWriter(options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """For `df.writeStream`; appends only."""
        options, queue = self._sink_options(schema, overwrite)
        if queue:
            from penstock.pipeline.sinks.queue import QueueStreamWriter

            return QueueStreamWriter(options, schema)
        from penstock.pipeline.sinks.topic import TopicStreamWriter

        return TopicStreamWriter(options, schema)


@plain_errors
class RefusedStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream that cannot be read. Spark's own process stumbles over a reader that could not be
    made, and tells of that; what the first call of a reader raises is handed on."""

    def __init__(self, error: PenstockError) -> None:
        self._error = error

    def _refuse(self, *_: Any) -> Any:
        raise self._error

    initialOffset: Any = _refuse  # noqa: N815
    getDefaultReadLimit: Any = _refuse  # noqa: N815
    prepareForTriggerAvailableNow: Any = _refuse  # noqa: N815
    latestOffset: Any = _refuse  # noqa: N815
    reportLatestOffset: Any = _refuse  # noqa: N815
    partitions: Any = _refuse
    read: Any = _refuse


def _append_only(overwrite: bool) -> None:
    if overwrite:
        raise InvalidRequest(
            "topics and queues are appended to: use mode append, and output mode append or update"
        )


def register(spark: Any) -> None:
    """Make `format("penstock")` known to this session, and the session to this thread."""
    activate(spark)
    spark.dataSource.register(PenstockSource)
