"""archive --watch: repeat the archive job so that the table stays within a target lag, and report
the lag to the broker.

A record that arrives just after a run was planned must be in the table within the target. The next
run therefore starts one target, less the duration of a run, after the start of the last one. The
lag in seconds is the time since the last finished run was planned: all earlier records are in the
table. The broker shows lag and target as a pipeline. Small files are merged after each run. Old
days and unused files are deleted once an hour.
"""

import _thread
import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from penstock.errors import Unavailable
from penstock.pipeline.failure import cause
from penstock.pipeline.jobs.archive import Archiver
from penstock.pipeline.lake.table import Superseded
from penstock.pipeline.options import QueueSourceOptions, TopicSourceOptions, read_options
from penstock.pipeline.report import HEARTBEAT_SECONDS, Listener, RunReport, notify, repeating
from penstock.pipeline.session import activate
from penstock.pipeline.sources.queue import QueuePlan
from penstock.pipeline.sources.topic_catalog import Topics

log = logging.getLogger("penstock.pipeline")

UPKEEP_SECONDS = 3600.0
MAX_FAILURES = 5  # consecutive runs without an answer of broker, database or store


# a report of the lag must not wait for a broker that does not answer
SHORT_PATIENCE = {"brokerTimeout": "1", "databaseTimeout": "1"}


class StopNow(BaseException):
    """Abort the current run: it waits for a broker or database that does not answer."""


class ArchiveWatch:
    def __init__(
        self,
        archiver: Archiver,
        target_seconds: float,
        listeners: list[Listener],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._archiver, self._listeners, self._clock = archiver, listeners, clock
        self._stop = threading.Event()
        self._answered = True  # whether the last request for the lag had an answer
        self._thread: threading.Thread | None = None  # that executes the runs
        self._planned = clock()  # when the current or last run was planned
        self._archived = self._planned  # when the last finished run was planned
        self._maintained = float("-inf")
        name = f"archive-{archiver.origin.name}"
        self._target = target_seconds
        self.report = RunReport(name=name, target_seconds=target_seconds)

    def stop(self) -> None:
        """Stop after the current run. If its source does not answer and this is a signal handler in
        its thread, abort the run."""
        self._stop.set()
        if not self._answered and threading.current_thread() is self._thread:
            raise StopNow

    def run(self, spark: Any) -> RunReport:
        """Repeat the job until `stop`. Return the last report."""
        try:
            with repeating(self._notify, HEARTBEAT_SECONDS):
                self._thread = threading.current_thread()
                try:
                    self._repeat(activate(spark))
                finally:
                    self._thread = None
            self.report.state = "finished"
        except StopNow:
            log.warning(
                "stopped during a run because its source does not answer; the next start repeats it"
            )
            self.report.state = "finished"
        except BaseException as error:
            self.report.state, self.report.error = "failed", cause(error)
            raise
        finally:
            self._notify()
        return self.report

    def _repeat(self, spark: Any) -> None:
        failures = 0
        while not self._stop.is_set():
            self._planned = self._clock()
            self.report.state = "running"
            try:
                self._run_once(spark)
                failures = 0
            except Superseded as error:
                log.info("%s", error)
            except Unavailable as error:
                failures += 1
                if failures >= MAX_FAILURES:
                    raise
                log.warning("%s; trying again", error)
            took = self._clock() - self._planned
            self.report.state = "idle"
            self._stop.wait(max(0.0, self._target - 2 * took))

    def _run_once(self, spark: Any) -> None:
        job = self._archiver
        done = job.run_all(spark)
        took = self._clock() - self._planned
        self._archived = self._planned
        self.report.batch += 1 if done.rows else 0
        self.report.rows += done.rows
        self.report.batch_ms = int(took * 1000)
        self.report.rows_per_second = done.rows / max(took, 1e-3)
        if self._clock() - self._maintained >= UPKEEP_SECONDS:
            job.maintain(spark)
            self._maintained = self._clock()
        elif done.rows:
            job.compact(spark)

    def behind(self) -> int:
        """Return how many records or messages are not in the table yet; messages up to a limit."""
        origin = self._archiver.origin
        given = {**origin.options(), **SHORT_PATIENCE}
        if not origin.topic:
            queue = QueuePlan(read_options(QueueSourceOptions, given), [], streaming=False)
            return queue.count(queue.state(), self._archiver.position() or 0)
        with closing(Topics(read_options(TopicSourceOptions, given))) as topics:
            lag = 0
            for label in topics.partitions(origin.topic):
                state, position = topics.state(label), self._archiver.position(label)
                lag += state.next - (state.first if position is None else position)
        return lag

    def _notify(self) -> None:
        try:
            self.report.lag = self.behind()
            self._answered = True
        except Unavailable as error:
            self._answered = False
            if self._stop.is_set() and self._thread is threading.main_thread():
                _thread.interrupt_main(signal.SIGTERM)  # its handler calls `stop` again
            log.debug("the lag is unknown: %s", error)
        waits = self.report.lag != 0
        self.report.lag_seconds = round(self._clock() - self._archived, 1) if waits else 0.0
        if notify(self._listeners, self.report):
            self._stop.set()
