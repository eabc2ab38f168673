"""archive --watch: runs the archive job again and again, so that the table is at most so many
seconds behind, and reports to the broker how far behind it is.

Runs follow each other so that a record that comes just after one was planned is in the table within
the target: the next one begins the target's time, less what a run takes, after the last one began.
The age of what is not archived yet is counted from the moment the last run was planned: everything
before it is archived. The broker shows it with the target as a pipeline; small files are merged
after each run, old days and unused files go once an hour.
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
MAX_FAILURES = 5  # runs in a row that the broker, the database or the store did not answer


# for a report of how much waits: it is not worth a wait, and says soon that nobody answers
SHORT_PATIENCE = {"brokerTimeout": "1", "databaseTimeout": "1"}


class StopNow(BaseException):
    """Leave the run that is under way: it waits for a broker or a database that does not answer."""


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
        self._answered = True  # the broker or the database did, when it was last asked what waits
        self._thread: threading.Thread | None = None  # that is in a run, or waits for the next
        self._planned = clock()  # all there was then is archived, or will be by the run under way
        self._archived = self._planned  # all there was then is archived
        self._maintained = float("-inf")
        name = f"archive-{archiver.origin.name}"
        self._target = target_seconds
        self.report = RunReport(name=name, target_seconds=target_seconds)

    def stop(self) -> None:
        """End after the run that is under way; now, if that waits for a broker that does not answer
        and this is a signal handler of its thread."""
        self._stop.set()
        if not self._answered and threading.current_thread() is self._thread:
            raise StopNow

    def run(self, spark: Any) -> RunReport:
        """Until stopped."""
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
                "stopped during a run, whose source does not answer; the next run repeats it"
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
        """Records or messages that are not in the table; messages up to a limit of their source."""
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
            log.debug("how much waits is not known now: %s", error)
        waits = self.report.lag != 0
        self.report.lag_seconds = round(self._clock() - self._archived, 1) if waits else 0.0
        if notify(self._listeners, self.report):
            self._stop.set()
