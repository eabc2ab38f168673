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

from pyspark.sql.streaming.listener import StreamingQueryListener

from penstock.pipeline.failure import cause
from penstock.pipeline.progress import in_words, lag_of
from penstock.pipeline.report import Heartbeat, Report
from penstock.pipeline.runner import stop_after_batch

log = logging.getLogger("penstock.pipeline")


class QueryListener(StreamingQueryListener):
    """Follows all queries of a session."""

    def __init__(self, spark: Any, url: str | None = None, token: str | None = None) -> None:
        self._spark = spark
        self._url, self._token = url, token
        self._reports: dict[str, Report] = {}  # by the query's run
        self._heartbeats: dict[str, Heartbeat] = {}

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802
        run = str(event.runId)
        name = event.name or f"query-{event.id}"
        self._reports[run] = Report(name, state="running", master=self._master())
        if self._url:
            self._heartbeats[run] = Heartbeat(self._url, name, self._token)
        self._send(run, event.id)

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        """A batch is done, or there was nothing to do."""
        progress = event.progress
        report = self._reports.get(str(progress.runId))
        if report is None:  # started before it was listened to
            return
        rows, sources = report.take(progress), progress["sources"]
        report.state = "running" if rows else "idle"
        report.lag, report.position = lag_of(sources), in_words(sources)
        if rows and report.position:
            log.info("%s: %s", report.name, report.position)
        self._send(str(progress.runId), progress.id)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        run = str(event.runId)
        if (report := self._reports.get(run)) is not None:
            report.state = "idle"
            self._send(run, event.id)

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        run = str(event.runId)
        if (report := self._reports.get(run)) is None:
            return
        report.error = cause(RuntimeError(event.exception)) if event.exception else None
        report.state = "failed" if event.exception else "finished"
        if report.error:
            log.error("%s failed: %s", report.name, report.error)
        self._send(run, event.id)
        del self._reports[run]
        self._heartbeats.pop(run, None)

    def _send(self, run: str, query: Any) -> None:
        heartbeat = self._heartbeats.get(run)
        if heartbeat is None:
            return
        heartbeat(self._reports[run])
        if heartbeat.stop_wanted:
            heartbeat.stop_wanted = False
            active = self._spark.streams.get(str(query))
            if active is not None:  # not here: Spark's events wait for this method
                threading.Thread(target=stop_after_batch, args=(active,), daemon=True).start()

    def _master(self) -> str:
        return str(self._spark.conf.get("spark.master", ""))
