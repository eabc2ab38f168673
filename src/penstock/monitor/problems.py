"""What needs somebody, worst first: the list on top of the Console and of `penstock status`.

Everything comes from figures that are in memory. A problem keeps the moment at which it was first
seen for as long as its text stays the same, so texts hold no figure that moves.

Dead letters are a problem while they increase: more of a queue than at some minute of the last 15,
as far as somebody watched. Old ones that nobody requeues are shown where they are.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from penstock.broker import Broker
from penstock.monitor.watched import Queue

LONG_WAIT_SECONDS = 300.0
LOW_DISK = 0.05  # of the disk's size
DEAD_LETTERS_SECONDS = 60.0  # between two notes of their counts
DEAD_LETTERS_NOTES = 15
MAX_REASON = 200  # characters


class Problem(msgspec.Struct):
    level: str  # error or warning
    text: str
    since: float | None  # milliseconds since 1970
    path: str  # of the view where it is mended


class Problems:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._since: dict[str, float] = {}  # problem -> when it was first seen
        self._letters: deque[tuple[float, dict[str, int]]] = deque(maxlen=DEAD_LETTERS_NOTES)

    def look(
        self,
        at: float,
        queues: Mapping[str, Queue],
        disk: dict[str, Any] | None,
        routes: list[dict[str, Any]],
    ) -> list[Problem]:
        errors, warnings = self._errors(routes), self._warnings(at, queues, disk)
        problems = [("error", *one) for one in errors] + [("warning", *one) for one in warnings]
        self._since = {text: self._since.get(text, at) for _, text, _ in problems}
        return [
            Problem(level, text, self._since[text] * 1000, path) for level, text, path in problems
        ]

    def _errors(self, routes: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
        """Texts, and paths to the views where they are mended."""
        broker = self._broker
        if not broker.database.healthy:
            yield f"PostgreSQL is away: {broker.database.problem}", "/buffers"
        elif broker.database.problem:
            yield broker.database.problem, "/overview"
        if broker.logs and (full := broker.logs.topics.disk_full):
            yield f"topics take no records: {full}", "/topics"
        if broker.buffer.failed.events:
            yield f"{broker.buffer.failed.events:,} buffered events were refused", "/buffers"
        for route in routes:
            if why := route.get("lastError"):
                yield f"route {route['name']}: {why}", f"/routes/{route['name']}"
        for pipeline in broker.logs.pipelines.all() if broker.logs else ():
            name = pipeline["name"]
            if pipeline["state"] == "failed":
                yield (
                    f"pipeline {name} failed: {_reason(pipeline)}",
                    "/pipelines",
                )
            elif pipeline["state"] == "lost":
                yield f"pipeline {name} is lost: it does not report any more", "/pipelines"

    def _warnings(
        self, at: float, queues: Mapping[str, Queue], disk: dict[str, Any] | None
    ) -> Iterator[tuple[str, str]]:
        self._note_letters(at, queues)
        for queue in queues.values():
            path = quote(queue.name, safe="")
            for group in queue.groups:
                if group.lag_seconds is not None and group.lag_seconds > LONG_WAIT_SECONDS:
                    name = group.name or "queue mode"
                    yield f"group {queue.name}@{name}: messages wait for long", f"/queues/{path}"
            if self._more_letters(queue):
                yield f"queue {queue.name} has new dead letters", f"/dead-letters?queue={path}"
        if disk and disk["free"] < LOW_DISK * disk["total"]:
            yield "the disk is nearly full", "/overview"

    def _note_letters(self, at: float, queues: Mapping[str, Queue]) -> None:
        notes = self._letters
        while notes and at - notes[0][0] > DEAD_LETTERS_SECONDS * DEAD_LETTERS_NOTES:
            notes.popleft()
        if queues and (not notes or at - notes[-1][0] >= DEAD_LETTERS_SECONDS):
            notes.append((at, {q.name: q.dead_letters for q in queues.values() if q.dead_letters}))

    def _more_letters(self, queue: Queue) -> bool:
        """Whether it has more than at some time that is noted; those of none are 0."""
        return queue.dead_letters > 0 and any(
            queue.dead_letters > note.get(queue.name, 0) for _, note in self._letters
        )


def _reason(pipeline: dict[str, Any]) -> str:
    """The first line: errors of Spark have many."""
    lines = str(pipeline.get("error") or "").strip().splitlines()
    return lines[0][:MAX_REASON] if lines else "it gave no reason"
