"""The data source Spark knows as `penstock`: hands over to the topic or the queue side, by the
options given.
"""

from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from penstock.errors import InvalidRequest, PenstockError
from penstock.pipeline.failure import plain_errors
from penstock.pipeline.options import (
    QueueSinkOptions,
    QueueSourceOptions,
    TopicSinkOptions,
    TopicSourceOptions,
    read_options,
)
from penstock.pipeline.session import activate
from penstock.pipeline.source_columns import QUEUE_DDL, TOPIC_DDL


@plain_errors
class PenstockSource(DataSource):
    """Topics and queues as tables and streams. See docs/reference/pipelines.md for the options."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def _of_queue(self, schema: StructType | None = None) -> bool:
        """Return whether the option `queue`, or for a sink a column of that name, is set."""
        given = {name.lower() for name, value in self.options.items() if value}
        queue = bool(given & {"queue", "assign"})
        topic = bool(given & {"topic", "topics", "subscribe", "topicpattern", "subscribepattern"})
        if queue and topic:
            raise InvalidRequest("give the option 'queue' or 'topic', not both")
        return queue or (not topic and schema is not None and "queue" in schema.fieldNames())

    def schema(self) -> str:
        return QUEUE_DDL if self._of_queue() else TOPIC_DDL

    def reader(self, schema: StructType) -> Any:
        return self._source(schema, streaming=False)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802
        try:
            return self._source(schema, streaming=True)
        except PenstockError as error:
            return RefusedStream(error)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """Return the writer of `df.write`, which can only append."""
        return self._sink(schema, overwrite, streaming=False)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802
        """Return the writer of `df.writeStream`, which can only append."""
        return self._sink(schema, overwrite, streaming=True)

    def _source(self, schema: StructType, *, streaming: bool) -> Any:
        columns = schema.fieldNames()
        if self._of_queue():
            from penstock.pipeline.sources.queue import QueuePlan, QueueReader, QueueStreamReader

            given = read_options(QueueSourceOptions, self.options)
            queue = QueuePlan(given, columns, streaming=streaming)
            return QueueStreamReader(queue) if streaming else QueueReader(queue)
        from penstock.pipeline.sources.topic import TopicPlan, TopicReader, TopicStreamReader

        topic = TopicPlan(read_options(TopicSourceOptions, self.options), columns)
        return TopicStreamReader(topic) if streaming else TopicReader(topic)

    def _sink(self, schema: StructType, overwrite: bool, *, streaming: bool) -> Any:
        if overwrite:
            raise InvalidRequest(
                "topics and queues are appended to: use mode append, and output mode append or "
                "update"
            )
        if self._of_queue(schema):
            from penstock.pipeline.sinks.queue import QueueWriter

            queue = read_options(QueueSinkOptions, self.options)
            return QueueWriter(queue, schema, streaming=streaming)
        from penstock.pipeline.sinks.topic import TopicWriter

        topic = read_options(TopicSinkOptions, self.options)
        return TopicWriter(topic, schema, streaming=streaming)


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


def register(spark: Any) -> None:
    """Make `format("penstock")` known to this session, and the session to this thread."""
    activate(spark)
    spark.dataSource.register(PenstockSource)
