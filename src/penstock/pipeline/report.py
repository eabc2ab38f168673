"""Report a pipeline's progress to the broker, whose answer says whether an operator stopped it.

Spark's progress has the offsets of sources as JSON. For ours these say, per topic, the next offset;
for a queue, the transaction up to which it was read, and with the latest offset how many messages
wait (up to a limit) and how old a standby's answer is.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.contract.pipelines import PipelineBatch, PipelineReport
from penstock.errors import PenstockError
from penstock.net.addresses import resource
from penstock.net.broker_caller import BrokerCaller

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


@dataclass(frozen=True)
class Position:
    """A position in one topic or queue, after a batch."""

    name: str  # "topic orders"
    place: str  # "offsets 0 to 99"
    lag: int | None = None  # records or messages behind; None when it is not known
    unit: str = "records"
    at_least: bool = False  # the lag was counted up to a limit
    standby_seconds: float | None = None  # how old a standby's answer may be

    def __str__(self) -> str:
        behind = ""
        if self.lag is not None:
            more = "at least " if self.at_least else ""
            unit = self.unit.removesuffix("s") if self.lag == 1 else self.unit
            behind = f", {more}{self.lag:,} {unit} behind" if self.lag else ", up to date"
        stale = self.standby_seconds
        standby = "" if stale is None else f", read from a standby {stale:.1f} s behind"
        return f"{self.name}: {self.place}{behind}{standby}"


def positions(sources: Iterable[Any]) -> list[Position]:
    """Return the positions in all topics and queues of a query's progress."""
    result: list[Position] = []
    for source in sources:
        start, end, latest = (
            _decoded(source[key]) for key in ("startOffset", "endOffset", "latestOffset")
        )
        result += [_queue(start, end, latest)] if "xid" in end else _topics(start, end, latest)
    return result


def in_words(sources: Iterable[Any]) -> str:
    """Describe all sources in one sentence; empty if none of them is ours."""
    return "; ".join(str(position) for position in positions(sources))


def lag_of(sources: Iterable[Any]) -> int | None:
    """Return the lag of all sources in records and messages; None if no source counts."""
    lags = [position.lag for position in positions(sources) if position.lag is not None]
    return sum(lags) if lags else None


def rows_of(progress: Any) -> int:
    """Return how many rows a batch read."""
    return int(_sum_of(progress, "numInputRows"))


def rate_of(progress: Any) -> float:
    """Return the rows per second of a batch."""
    return float(_sum_of(progress, "processedRowsPerSecond"))


def _sum_of(progress: Any, name: str) -> Any:
    """Sum a figure over all sources; Spark Connect does not."""
    total = progress[name]
    return sum(one[name] or 0 for one in progress["sources"]) if total is None else total


def _decoded(text: Any) -> dict[str, Any]:
    """Decode an offset; empty if there is none yet, or it is another source's."""
    try:
        offset = json.loads(text or "null") if isinstance(text, str) else text
    except ValueError:
        return {}
    return offset if isinstance(offset, dict) else {}


def _topics(
    start: dict[str, Any], end: dict[str, Any], latest: dict[str, Any]
) -> Iterator[Position]:
    for topic in {**end, **latest}:
        first, last, newest = (_next(offset, topic) for offset in (start, end, latest))
        if last is None and newest is None:
            continue  # another source's offsets
        lag = None if newest is None else max(0, newest - (last or 0))
        if last is None:
            place = "nothing read yet"
        elif first is not None and first < last:
            place = f"offsets {first} to {last - 1}"
        else:
            place = f"up to offset {last - 1}" if last else "no record yet"
        yield Position(f"topic {topic}", place, lag)


def _next(offset: dict[str, Any], topic: str) -> int | None:
    at = offset.get(topic)
    return int(at["next"]) if isinstance(at, dict) and "next" in at else None


def _queue(start: dict[str, Any], end: dict[str, Any], latest: dict[str, Any]) -> Position:
    since = f"from {start['xid']} " if start.get("xid", "0") != "0" else "up "
    return Position(
        f"queue {end['queue']}",
        f"transactions {since}to {end['xid']}",
        latest.get("waiting"),
        "messages",
        at_least=bool(latest.get("more")),
        standby_seconds=latest.get("behindSeconds"),
    )
