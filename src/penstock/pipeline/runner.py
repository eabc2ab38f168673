"""Run a pipeline: start its queries, report their progress, and stop them between batches.

Reports go to a terminal, to standard output as JSON lines, and to the broker. The broker shows them
to operators and passes on a request to stop. A broker that does not answer does not affect the
pipeline.
"""

import logging
import threading
import time
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException

from penstock.contract.pipelines import PipelineNode
from penstock.errors import PenstockError
from penstock.pipeline import query_builder
from penstock.pipeline.failure import PipelineFailed, cause
from penstock.pipeline.pipeline_file import PipelineFile
from penstock.pipeline.query_builder import Built, Query, SinkOutput
from penstock.pipeline.report import (
    HEARTBEAT_SECONDS,
    Listener,
    RunReport,
    in_words,
    lag_of,
    notify,
    repeating,
    rows_of,
)
from penstock.pipeline.session import activate
from penstock.pipeline.session import build as build_session
from penstock.pipeline.step_history import record_steps
from penstock.pipeline.validation import resolve_routes

log = logging.getLogger("penstock.pipeline")

POLL_SECONDS = 0.25
STOP_SECONDS = 120.0  # the longest wait for the current batch
MAX_ATTEMPTS = 5
WORKER_TOO_SLOW = "Python worker failed to connect back"


class Runner:
    def __init__(
        self,
        pipeline: PipelineFile,
        master: str = "local[*]",
        listeners: list[Listener] | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.report = RunReport(name=pipeline.name, master=master)
        self._listeners = listeners or []
        self._stop = threading.Event()
        self._seen = -1  # the last batch of the main query that the report has

    def stop(self) -> None:
        """Stop the pipeline after the current batch. May be called from a signal handler."""
        self._stop.set()

    def run(self, spark: Any = None) -> RunReport:
        """Run until all data is processed (availableNow and batch), otherwise until stopped."""
        self._report()
        try:
            with repeating(self._report, HEARTBEAT_SECONDS):  # a JVM takes its time to start
                session, built = self._prepare(spark)
            if self._stop.is_set():
                log.info("stopped before the first batch")
            elif self.pipeline.streaming:
                self._keep_running(session, built.queries)
            else:
                self._run_batch(built.outputs)
        except BaseException as error:
            self.report.error = cause(error)
            self._report("failed")
            if isinstance(error, PenstockError) or not isinstance(error, Exception):
                raise
            raise PipelineFailed(self.report.error) from error
        self._report("finished")
        return self.report

    def _prepare(self, spark: Any) -> tuple[Any, Built]:
        """Create the session and the queries."""
        self.pipeline = resolve_routes(self.pipeline)
        settings = {name: str(value) for name, value in self.pipeline.spark.items()}
        session = spark or build_session(self.pipeline.name, self.report.master, settings)
        activate(session)
        built = query_builder.build(session, self.pipeline)
        self.report.graph = graph_of(self.pipeline, built)
        if self.pipeline.streaming:
            record_steps(session, self.pipeline, built.frames.views, built.inputs)
        return session, built

    def _run_batch(self, outputs: list[SinkOutput]) -> None:
        self._report("running")
        began = time.monotonic()
        p = self.pipeline
        # Each run writes its rows again, unless the pipeline file has an appId: then all runs are
        # one application.
        run = "" if p.appId else f":{uuid.uuid4().hex}"
        outputs = [replace(output, app=output.app + run) for output in outputs]
        counted, observed = query_builder.counted(outputs[0].frame)
        with repeating(partial(self._count_tasks, counted), POLL_SECONDS):
            for output in reversed(outputs):  # the main one last
                rows = counted if output is outputs[0] else output.frame
                try:
                    query_builder.batch_writer(p, output)(rows, 0)
                except Exception as error:  # whatever a sink raises
                    raise PipelineFailed(f"{output.title}: {cause(error)}") from error
        self.report.rows = observed.get["rows"]
        self.report.rows_per_second = self.report.rows / max(time.monotonic() - began, 1e-3)
        self.report.progress = 1.0
        self.report.batch, self.report.batch_ms = 0, int((time.monotonic() - began) * 1000)

    def _count_tasks(self, frame: Any) -> None:
        """Report the share of planned Spark tasks that are done."""
        if hasattr(frame, "_jdf"):  # Spark Connect has no tracker
            tracker = frame.sparkSession.sparkContext.statusTracker()
            stages = [tracker.getStageInfo(one) for one in tracker.getActiveStageIds()]
            if tasks := sum(stage.numTasks for stage in stages if stage):
                done = sum(stage.numCompletedTasks for stage in stages if stage)
                self.report.progress = done / tasks
        self._report()

    def _keep_running(self, session: Any, queries: list[Query]) -> None:
        """Resume from the checkpoint when no Python worker started within Spark's fixed 10 s."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return self._run_streams(session, queries)
            except Exception as error:
                last = attempt == MAX_ATTEMPTS or self._stop.is_set()
                if last or WORKER_TOO_SLOW not in f"{error} {error.__cause__}":
                    raise
                log.warning("a Python worker did not start in time; resuming from the checkpoint")
        return None

    def _run_streams(self, session: Any, planned: list[Query]) -> None:
        # a directory, or a URL of storage that the cluster shares
        root = (self.pipeline.checkpoint or "").rstrip("/")
        writers = [query.writer(f"{root}/{query.name}") for query in planned]
        queries: list[Any] = []
        try:
            session.streams.resetTerminated()
            for writer in writers:
                queries.append(writer.start())  # noqa: PERF401 - if one fails, others are stopped
            self._report("running")
            while any(query.isActive for query in queries):
                if self._stop.is_set():
                    self._report("stopping")
                    for query in queries:
                        stop_after_batch(query)
                    break
                await_any_end(session, POLL_SECONDS)
                if any(query.exception() is not None for query in queries):
                    break
                self._take_progress(queries)
            self._take_progress(queries)
            for query, plan in zip(queries, planned, strict=True):
                if (failure := query.exception()) is not None:
                    where = "" if "://" in root else failed_batch(Path(root) / plan.name)
                    # the error of a query with several sinks names the failed one
                    who = f"{plan.title}: " if len(planned) > 1 and not plan.cut else ""
                    place = f" ({where})" if where else ""
                    raise PipelineFailed(f"{who}{cause(failure)}{place}") from failure
        finally:
            for query in queries:
                if query.isActive:
                    query.stop()

    def _take_progress(self, queries: list[Any]) -> None:
        report, query = self.report, queries[0]
        for progress in query.recentProgress:
            if int(progress["batchId"]) > self._seen and rows_of(progress):
                report.take(progress)
                self._seen = report.batch
        last = query.lastProgress
        if last is not None:
            report.lag = lag_of(last["sources"])
            report.position = in_words(last["sources"]) or report.position
            if self.pipeline.trigger == "availableNow" and report.lag is not None:
                report.progress = report.rows / max(1, report.rows + report.lag)
        state = report.state
        statuses = [one.status for one in queries if one.isActive]
        if statuses and state != "stopping":
            busy = any(one["isTriggerActive"] and one["isDataAvailable"] for one in statuses)
            state = "running" if busy else "idle"
        self._report(state)

    def _report(self, state: str | None = None) -> None:
        self.report.state = state or self.report.state
        if notify(self._listeners, self.report):
            self._stop.set()


def graph_of(pipeline: PipelineFile, built: Built) -> list[PipelineNode]:
    """Return the sources, steps and sinks, each with the names of its inputs."""
    nodes = [PipelineNode("source", name, source.title) for name, source in pipeline.views.items()]
    nodes += [
        PipelineNode("step", name, inputs=list(dict.fromkeys(inputs)))
        for name, inputs in built.inputs.items()
    ]
    for output in built.outputs:
        view = output.view or output.name.partition(":")[2]
        nodes.append(PipelineNode("sink", output.name, output.sink.title, [view]))
    return nodes


def failed_batch(checkpoint: Path) -> str:
    """Describe the batch that was begun and not finished; empty if unknown."""
    begun, done = (
        [int(path.name) for path in (checkpoint / kind).glob("*") if path.name.isdigit()]
        for kind in ("offsets", "commits")
    )
    if not begun or max(begun) in done:
        return ""
    number = max(begun)
    ends = _offsets(checkpoint, number)
    # the first batch has no start offsets
    starts = _offsets(checkpoint, number - 1) if number - 1 in begun else ["{}"] * len(ends)
    sources = [
        {"startOffset": start, "endOffset": end, "latestOffset": None}
        for start, end in zip(starts, ends, strict=False)
    ]
    return f"batch {number}: {in_words(sources)}"


def _offsets(checkpoint: Path, number: int) -> list[str]:
    """Return the end of a batch in each source, as JSON."""
    # the first two lines are the version and metadata (OffsetSeqLog in github.com/apache/spark)
    return (checkpoint / "offsets" / str(number)).read_text().splitlines()[2:]


def await_any_end(session: Any, seconds: float) -> None:
    """Wait until a query of the session ends or fails, or the time has passed."""
    try:
        ended = session.streams.awaitAnyTermination(seconds)
    except StreamingQueryException:  # `query.exception()` returns it
        ended = True
    if ended:  # or the next call would return at once because of the same query
        session.streams.resetTerminated()


def stop_after_batch(query: Any) -> None:
    """Stop a query after its current batch, or after STOP_SECONDS."""
    deadline = time.monotonic() + STOP_SECONDS
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
        time.sleep(0.05)
    query.stop()
