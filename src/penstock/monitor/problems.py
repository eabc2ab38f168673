"""List problems, worst first, for the top of the Console and `penstock status`.

All figures are in memory, except the number of open files, which comes from the kernel. A problem
without a known start starts when it is first seen with this text, so texts contain no figure that
changes.

Dead letters are a problem for 15 minutes, by the minutes that PostgreSQL counts. Older ones are
listed with their queue.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from urllib.parse import quote

import msgspec

from penstock.broker import Broker
from penstock.contract.consumers import ConsumerHealth
from penstock.contract.pipelines import PipelineStatus
from penstock.contract.routes import RouteStatus
from penstock.monitor.figures import DiskSpace, WatchedQueue
from penstock.protocol.names import QUEUE_MODE

LONG_WAIT_SECONDS = 300.0
LONG_CALL_SECONDS = 600.0  # a handler hangs, or does what should be split
LOW_DISK = 0.05  # of the disk's size
MANY_FILES = 0.9  # of those that the process may open
MAX_REASON = 200  # characters

Wrong = tuple[str, str, float | None]  # the text, the path of the view, since when if known


class Problem(msgspec.Struct):
    level: str  # error or warning
    text: str
    since: float | None  # milliseconds since 1970
    path: str  # of the view where it can be fixed


class Problems:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._since: dict[str, float] = {}  # problem -> when it was first seen

    def find(
        self,
        at: float,
        queues: Mapping[str, WatchedQueue],
        deaths: Mapping[str, int],
        disk: DiskSpace | None,
        routes: list[RouteStatus],
        consumers: Sequence[ConsumerHealth] = (),
    ) -> list[Problem]:
        """Return the problems, worst first. `deaths` has the new dead letters of each queue."""
        errors = self._errors(routes)
        warnings = chain(_of_consumers(at, consumers), self._warnings(at, queues, deaths, disk))
        problems = [("error", *one) for one in errors] + [("warning", *one) for one in warnings]
        self._since = {
            text: self._since.get(text, at) if since is None else since
            for _, text, _, since in problems
        }
        return [
            Problem(level, text, self._since[text] * 1000, path)
            for level, text, path, _ in problems
        ]

    def _errors(self, routes: list[RouteStatus]) -> Iterator[Wrong]:
        broker = self._broker
        if not broker.database.healthy:
            yield f"PostgreSQL is down: {broker.database.problem}", "/buffers", None
        elif broker.database.problem:
            yield broker.database.problem, "/overview", None
        if broker.logs and (full := broker.logs.topics.disk_full):
            yield f"topics reject records: {full}", "/topics", None
        if broker.logs and (tier := broker.logs.tier):
            if tier.problem:
                yield f"the tier of topics: {tier.problem}", "/topics", None
            for topic, reason in sorted(tier.topic_problems.items()):
                path = f"/topics/{quote(topic, safe='')}"
                yield f"topic {topic} is not copied to the tier: {reason}", path, None
        if broker.buffer.failed.events:
            yield "the database rejected buffered events", "/buffers", None
        for route in routes:
            if why := route.last_error or (route.tries_again_seconds is not None and route.paused):
                path = f"/routes/{quote(route.name, safe='')}"
                yield f"route {route.name}: {why}", path, route.failing_since or None
        for pipeline in broker.logs.pipelines.all() if broker.logs else ():
            wrong = ""
            if pipeline.state == "failed":
                wrong = f"failed: {_reason(pipeline)}"
            elif pipeline.state == "lost":
                wrong = "is lost: it has stopped reporting"
            if wrong:
                yield f"pipeline {pipeline.name} {wrong}", "/pipelines", pipeline.reported_at

    def _warnings(
        self,
        at: float,
        queues: Mapping[str, WatchedQueue],
        deaths: Mapping[str, int],
        disk: DiskSpace | None,
    ) -> Iterator[Wrong]:
        for name, queue in queues.items():
            path = quote(name, safe="")
            for group in queue.groups:
                if group.lag_seconds is not None and group.lag_seconds > LONG_WAIT_SECONDS:
                    address = f"{name}@{group.name or 'queue mode'}"
                    text = f"group {address}: messages wait for more than 5 minutes"
                    yield text, f"/queues/{path}", at - group.lag_seconds
            if queue.figures.dead_letters and deaths.get(name):
                text = f"queue {name} has new dead letters"
                yield text, f"/dead-letters?queue={path}", None
        if disk and disk.free < LOW_DISK * disk.total:
            yield "the disk is nearly full", "/overview", None
        figures = self._broker.metrics
        opened, allowed = (
            sum(figures.values_of(f"process_{name}_fds").values()) for name in ("open", "max")
        )
        if opened > MANY_FILES * allowed:
            text = (
                "the broker is close to its limit of open files and connections: raise it "
                "(LimitNOFILE= in the systemd unit, ulimit -Hn)"
            )
            yield text, "/overview", None


def _of_consumers(at: float, consumers: Sequence[ConsumerHealth]) -> Iterator[Wrong]:
    for one in consumers:
        group = f"{one.queue}@{'queue mode' if one.group == QUEUE_MODE else one.group}"
        path = f"/queues/{quote(one.queue, safe='')}"
        if one.in_flight_seconds > LONG_CALL_SECONDS:
            text = f"a handler of {group} at {one.name} has been running for more than 10 minutes"
            yield text, path, at - one.in_flight_seconds
        if one.problem:
            yield f"group {group}: {one.problem}", path, None


def _reason(pipeline: PipelineStatus) -> str:
    """Return the first line: errors of Spark have many."""
    lines = (pipeline.error or "").strip().splitlines()
    return lines[0][:MAX_REASON] if lines else "no reason given"
