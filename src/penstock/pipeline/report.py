"""Report a pipeline's progress to the broker, whose answer says whether an operator stopped it."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from penstock.contract.pipelines import PipelineBatch, PipelineReport
from penstock.errors import PenstockError
from penstock.net.addresses import resource
from penstock.net.broker_caller import BrokerCaller
from penstock.pipeline.progress import rate_of, rows_of

log = logging.getLogger("penstock.pipeline")

HEARTBEAT_SECONDS = 2.0
MAX_BATCHES = 20  # in a report


class RunReport(PipelineReport, kw_only=True):
    """The contract's report, filled in by a run."""

    name: str
    state: str = "starting"  # starting, running, idle, stopping, finished, failed
    host: str = msgspec.field(default_factory=socket.gethostname)
    pid: int = msgspec.field(default_factory=os.getpid)
    started_at: float = msgspec.field(default_factory=time.time)

    def take(self, progress: Any) -> int:
        """Record Spark's progress of a batch. Return the number of rows read."""
        rows = rows_of(progress)
        self.batch, self.rows = int(progress["batchId"]), self.rows + rows
        self.rows_per_second = rate_of(progress)
        self.batch_ms = int(progress["durationMs"].get("triggerExecution", 0))
        state = progress["stateOperators"]
        self.state_rows = sum(int(one["numRowsTotal"]) for one in state)
        self.state_bytes = sum(int(one["memoryUsedBytes"]) for one in state)
        batch = PipelineBatch(self.batch, str(progress["timestamp"]), rows, self.batch_ms)
        self.batches = [batch, *self.batches][:MAX_BATCHES]
        return rows

    def fields(self) -> dict[str, Any]:
        """Return all fields and the time, for the broker and for JSON lines."""
        self.at = round(time.time(), 3)
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


Listener = Callable[[RunReport], None]


def notify(listeners: list[Listener], report: RunReport) -> bool:
    """Pass the report to the listeners. Return whether one of them wants the pipeline to stop."""
    for listener in listeners:
        listener(report)
    return any(getattr(listener, "stop_wanted", False) for listener in listeners)


@contextmanager
def repeating(action: Callable[[], None], seconds: float) -> Iterator[None]:
    """Run `action` in a thread every `seconds` until the block ends."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            action()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Heartbeat:
    """Send reports to the broker. Its answers set `stop_wanted`."""

    def __init__(self, url: str, name: str, token: str | None = None) -> None:
        self._caller = BrokerCaller(url, token=token, timeout=HEARTBEAT_SECONDS)
        self._path = resource("/api/v1/pipelines", name)
        self._last = 0.0
        self._state = ""
        self._warned = False
        self.stop_wanted = False

    def __call__(self, report: RunReport) -> None:
        """Send the report if its state has changed or HEARTBEAT_SECONDS have passed."""
        if time.monotonic() - self._last < HEARTBEAT_SECONDS and report.state == self._state:
            return
        self._last, self._state = time.monotonic(), report.state
        try:
            answer = self._caller.json("PUT", self._path, report.fields())
            self.stop_wanted |= isinstance(answer, dict) and bool(answer.get("stop"))
        except PenstockError as error:
            if not self._warned:
                log.warning("the broker does not accept this pipeline's report: %s", error)
                self._warned = True
