"""Log the progress of any streaming query, and report it to the broker.

    penstock.pipeline.watch(spark, "http://127.0.0.1:6632")

Each batch is logged ("copier: topic orders: offsets 0 to 99, 12 records behind"). The Console and
`penstock pipeline list` show the query under its `queryName`, like a pipeline from a file, and an
operator can stop it there. A broker that does not answer does not affect the query. Spark reports
a query without new data every 10 s, which is often enough for the broker.
"""

import logging
import threading
from typing import Any
from uuid import UUID

from pyspark.sql.streaming.listener import StreamingQueryListener

from penstock.pipeline.failure import cause
from penstock.pipeline.report import Heartbeat, RunReport, in_words, lag_of
from penstock.pipeline.runner import stop_after_batch

log = logging.getLogger("penstock.pipeline")


class QueryListener(StreamingQueryListener):
    """Follows all queries of a session."""

    def __init__(self, spark: Any, url: str | None = None, token: str | None = None) -> None:
        self._spark = spark
        self._url, self._token = url, token
        # by run id; queries that started before the listener are not included
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
        """Handle the end of a batch."""
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
        """Report the query of an event or a progress."""
        heartbeat = self._heartbeats.get(query.runId)
        if heartbeat is None:
            return
        heartbeat(self._reports[query.runId])
        if heartbeat.stop_wanted:
            heartbeat.stop_wanted = False
            active = self._spark.streams.get(str(query.id))
            if active is not None:  # in a thread: this method blocks further events
                threading.Thread(target=stop_after_batch, args=(active,), daemon=True).start()
