"""Driving sources as Spark does, without Spark: what a reader decides is tested in milliseconds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from penstock.pipeline.options import TopicSourceOptions, read_options
from penstock.pipeline.runner import MAX_ATTEMPTS, WORKER_TOO_SLOW
from penstock.pipeline.source_columns import TOPIC_COLUMNS
from penstock.pipeline.sources.topic import TopicPlan, TopicReader, TopicStreamReader

T = TypeVar("T")


def topic_options(columns: list[str] | None = None, **options: Any) -> TopicPlan:
    given = {name: str(value) for name, value in options.items()}
    return TopicPlan(read_options(TopicSourceOptions, given), columns or TOPIC_COLUMNS.names)


def rows_of(reader: Any, tasks: Any) -> list[dict[str, Any]]:
    return [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


def batch_rows(columns: list[str] | None = None, **options: Any) -> list[dict[str, Any]]:
    reader = TopicReader(topic_options(columns, **options))
    return rows_of(reader, reader.partitions())


def patiently(run: Callable[[], T]) -> T:
    """Run a query from its checkpoint again when this machine was too busy to start a Python worker
    in the 10 seconds that Spark allows.
    """
    for _ in range(MAX_ATTEMPTS - 1):
        try:
            return run()
        except Exception as error:
            if WORKER_TOO_SLOW not in str(error):
                raise
    return run()


class Driver:
    """Runs micro-batches of a streaming reader until nothing is left; its offsets live in a file,
    as JSON.
    """

    def __init__(self, checkpoint: Path, **options: Any) -> None:
        self.checkpoint, self.options = checkpoint, options

    def run(self, *, available_now: bool = True, **more: Any) -> list[list[dict[str, Any]]]:
        """The rows, batch by batch."""
        reader = TopicStreamReader(topic_options(**{**self.options, **more}))
        if available_now:
            reader.prepareForTriggerAvailableNow()
        limit = reader.getDefaultReadLimit()
        batches = []
        at = (
            json.loads(self.checkpoint.read_text())
            if self.checkpoint.exists()
            else reader.initialOffset()
        )
        done = None
        while True:
            end = json.loads(json.dumps(reader.latestOffset(at, limit)))
            if end == at:
                break
            if done is not None:
                reader.commit(done)  # as Spark does: when there is a next batch
            first, again = reader.partitions(at, end), reader.partitions(at, end)
            assert first == again
            batches.append(rows_of(reader, first))
            at = done = end
            self.checkpoint.write_text(json.dumps(at))
        return batches
