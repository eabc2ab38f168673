"""A `StreamingQueryListener` of ours: any streaming query is shown in words, and on the broker.

    penstock.pipeline.watch(spark, "http://127.0.0.1:6632")

Each batch is then logged ("copier: topic orders: offsets 0 to 99, 12 records behind"), and the
query stands in the Console and in `penstock pipeline list` under its `queryName`, as a pipeline
from a file does; an operator can stop it there. A broker that does not answer disturbs nothing.
Spark tells of a query without new data every 10 s, which is often enough to be seen.
"""

import logging
import threading
from typing import Any
from uuid import UUID

from pyspark.sql.streaming.listener import StreamingQueryListener

from penstock.pipeline.failure import cause
from penstock.pipeline.progress import in_words, lag_of
from penstock.pipeline.report import Heartbeat, RunReport
from penstock.pipeline.runner import stop_after_batch

log = logging.getLogger("penstock.pipeline")


class QueryListener(StreamingQueryListener):
    """Follows all queries of a session."""

    def __init__(self, spark: Any, url: str | None = None, token: str | None = None) -> None:
        self._spark = spark
        self._url, self._token = url, token
        # by the query's run; none of those that began before they were listened to
        self._reports: dict[UUID, RunReport] = {}
        self._heartbeats: dict[UUID, Heartbeat] = {}

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802
        name = event.name or f"query-{event.id}"
        master = str(self._spark.conf.get("spark.master", ""))
        self._reports[event.runId] = RunReport(name=name, state="running", master=master)
        if self._url:
            self._heartbeats[event.runId] = Heartbeat(self._url, name, self._token)
        self._send(event)

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        """A batch is done, or there was nothing to do."""
        progress = event.progress
        if (report := self._reports.get(progress.runId)) is None:
            return
        rows, sources = report.take(progress), progress["sources"]
        report.state = "running" if rows else "idle"
        report.lag, report.position = lag_of(sources), in_words(sources)
        if rows and report.position:
            log.info("%s: %s", report.name, report.position)
        self._send(progress)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        if (report := self._reports.get(event.runId)) is not None:
            report.state = "idle"
            self._send(event)

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        if (report := self._reports.get(event.runId)) is None:
            return
        report.error = cause(RuntimeError(event.exception)) if event.exception else None
        report.state = "failed" if event.exception else "finished"
        if report.error:
            log.error("%s failed: %s", report.name, report.error)
        self._send(event)
        del self._reports[event.runId]
        self._heartbeats.pop(event.runId, None)

    def _send(self, query: Any) -> None:
        """Report the query that an event or its progress is of."""
        heartbeat = self._heartbeats.get(query.runId)
        if heartbeat is None:
            return
        heartbeat(self._reports[query.runId])
        if heartbeat.stop_wanted:
            heartbeat.stop_wanted = False
            active = self._spark.streams.get(str(query.id))
            if active is not None:  # not here: Spark's events wait for this method
                threading.Thread(target=stop_after_batch, args=(active,), daemon=True).start()
