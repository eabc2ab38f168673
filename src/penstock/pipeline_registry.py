"""The registry of pipelines. They run elsewhere (on Spark), report their state to the broker, and
get requests to stop as the answer.

A pipeline reports every few seconds. If it is silent for `LOST_AFTER_SECONDS` and did not report
its end, its state is shown as `lost`. Reports are kept in memory. When the state of a pipeline
changes, all of them are written to one small file, so that a restarted broker still shows what
finished, what failed and why. A report includes the last runs of the pipeline, and the rows and the
lag of its last minutes.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path

import msgspec

from penstock.contract.pipelines import (
    PipelineMinute,
    PipelineReport,
    PipelineRun,
    PipelineStatus,
    PipelineWish,
)
from penstock.errors import NotFound, PenstockError
from penstock.io.fs import DISK, Fs
from penstock.metrics import Metrics
from penstock.protocol.status import NOT_JSON

log = logging.getLogger("penstock.pipeline_registry")

LOST_AFTER_SECONDS = 15.0
ENDED = ("finished", "failed")
MAX_PIPELINES = 1000
MAX_RUNS = 20  # kept per pipeline
MAX_MINUTES = 15  # kept per pipeline
GAUGES = {
    "lag": "Records or messages of the source that the pipeline has not processed yet",
    "lag_seconds": "Age of the oldest record or message that the pipeline has not processed yet",
    "target_lag_seconds": "Target that lag_seconds should stay below",
    "rows_per_second": "Rows per second of the last batch",
    "batch_seconds": "Duration of the last batch",
    "rows": "Rows that the pipeline has read since it started",
    "batch": "Number of the last batch",
    "state_rows": "Rows in the state of the stream: of aggregates, joins and deduplication",
    "state_bytes": "Memory of the state of the stream",
    "report_age_seconds": "Time since the last report of the pipeline",
}
Figure = Callable[[PipelineStatus], float | None]


class Pipelines:
    """The latest report of every pipeline. Lives on the event loop."""

    def __init__(
        self,
        directory: Path,
        metrics: Metrics | None = None,
        *,
        fs: Fs = DISK,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = directory / "pipelines.json"
        self._fs, self._clock = fs, clock
        self._reports: dict[str, PipelineStatus] = {}
        self._stops: set[str] = set()
        if metrics is not None:
            self._measure(metrics)

    def _measure(self, metrics: Metrics) -> None:
        metrics.gauge(
            "penstock_pipeline_state",
            "1 for the current state of the pipeline",
            "pipeline",
            "state",
            read=lambda: {(one.name, one.state): 1 for one in self.all()},
        )
        computed: dict[str, Figure] = {
            "target_lag_seconds": lambda one: one.target_seconds,
            "batch_seconds": lambda one: one.batch_ms / 1000,
            "report_age_seconds": lambda one: self._clock() - one.reported_at,
        }
        for name in GAUGES:
            read = partial(self._values, computed.get(name) or attrgetter(name))
            metrics.gauge(f"penstock_pipeline_{name}", GAUGES[name], "pipeline", read=read)

    def _values(self, value: Figure) -> dict[tuple[str], float]:
        """Return a figure of the running pipelines. Others have no lag and no rate."""
        running = [one for one in self.all() if one.state not in ENDED]
        figures = ((one.name, value(one)) for one in running)
        return {(name,): float(figure) for name, figure in figures if figure is not None}

    async def start(self) -> None:
        """Read the reports from before the broker's last stop."""
        try:
            text = self._fs.read(self._path)
            self._reports = msgspec.json.decode(text, type=dict[str, PipelineStatus])
        except FileNotFoundError:
            return
        except NOT_JSON:
            log.warning("%s is damaged: earlier reports of pipelines are lost", self._path.name)

    async def stop(self) -> None:
        self._save()

    def put(self, name: str, report: PipelineReport) -> PipelineWish:
        """Store a report. Return whether the pipeline should stop."""
        before = self._reports.get(name)
        if before is None and len(self._reports) >= MAX_PIPELINES:
            del self._reports[min(self._reports, key=lambda one: self._reports[one].reported_at)]
        now = self._clock()
        self._reports[name] = PipelineStatus(
            **msgspec.structs.asdict(report),
            name=name,
            reported_at=now,
            runs=_runs(before, report, now),
            minutes=_minutes(before, report, now),
        )
        if report.state == "starting" or report.state in ENDED:
            self._stops.discard(name)
        changed = before is None or before.state != report.state
        if changed and report.state in ("starting", *ENDED):
            why = f" ({report.error})" if report.error else ""
            log.info("pipeline %s on %s: %s%s", name, report.host, report.state, why)
            self._save()
        return PipelineWish(name in self._stops)

    def all(self) -> list[PipelineStatus]:
        return [self.get(name) for name in sorted(self._reports)]

    def get(self, name: str) -> PipelineStatus:
        """Return the latest report of a pipeline. Raises NotFound if there is none."""
        report = self._reports.get(name)
        if report is None:
            raise NotFound(f"no pipeline {name!r} has reported here")
        silent = self._clock() - report.reported_at
        lost = report.state not in ENDED and silent > LOST_AFTER_SECONDS
        state = "lost" if lost else report.state
        return msgspec.structs.replace(report, state=state, stopping=name in self._stops)

    def ask_to_stop(self, name: str) -> PipelineStatus:
        """Ask a pipeline to stop, in the answer to its next report."""
        self.get(name)
        self._stops.add(name)
        return self.get(name)

    def forget(self, name: str) -> None:
        self.get(name)
        del self._reports[name]
        self._stops.discard(name)
        self._save()

    def _save(self) -> None:
        try:
            self._fs.make_dir(self._path.parent)
            self._fs.replace(self._path, msgspec.json.encode(self._reports), sync=False)
        except PenstockError as error:
            # pipelines report again, and do not depend on this file
            log.warning("reports of pipelines could not be saved: %s", error)


def _runs(before: PipelineStatus | None, report: PipelineReport, now: float) -> list[PipelineRun]:
    """Return the last runs, newest first, updated from this report."""
    runs = before.runs if before else []
    run = PipelineRun(
        report.state,
        report.started_at,
        report.rows,
        report.batch,
        report.error,
        report.host,
        reported_at=now,
    )
    same = bool(runs) and runs[0].started_at == run.started_at
    return [run, *(runs[1:] if same else runs)][:MAX_RUNS]


def _minutes(
    before: PipelineStatus | None, report: PipelineReport, now: float
) -> list[PipelineMinute]:
    """Return rows and lag of the last minutes. `rows` of a report count from the run's start."""
    minutes, rows = list(before.minutes if before else ()), report.rows
    if before and before.started_at == report.started_at:
        rows = max(0, rows - before.rows)
    this = now // 60 * 60
    if minutes and minutes[-1].at == this:
        rows += minutes.pop().rows
    return [*minutes, PipelineMinute(this, rows, report.lag)][-MAX_MINUTES:]
