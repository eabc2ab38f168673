"""Events that the database rejected. They are kept until they are stored or a person decides.

    failed/<file>         the rejected events of the buffer file of that name, in the same format
    failed/<file>.error   a line for each: {"line", "queue", "partition", "transaction_id", "error"}

A file is tried again after `retry_interval`, then after twice that, and so on up to five minutes: a
full queue may have room again, or a schema was repaired. Stored events leave the file. No other
event waits for these.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import msgspec

from penstock.buffer.backlog import BufferFile
from penstock.buffer.events import count_events
from penstock.buffer.files import FAILED, Name, parse
from penstock.buffer.storage import BufferStorage
from penstock.queues.types import Item

log = logging.getLogger("penstock.buffer")

MAX_FAILED_PAUSE_SECONDS = 300.0  # pauses double up to this


@dataclass(slots=True)
class RefusedEvent:
    """An event that the database rejected, and why."""

    item: Item
    error: str


@dataclass(slots=True, eq=False, kw_only=True)
class FailedFile(BufferFile):
    due: float  # on the monotonic clock
    pause: float
    reason: str  # of its first event


class FailedEvents:
    """The files in failed/ that belong to this process."""

    def __init__(self, storage: BufferStorage) -> None:
        self.directory = storage.directory / FAILED
        self._fs = storage.fs
        self._storage = storage
        self._interval = storage.settings.retry_interval
        # Written by threads of the pool and read on the event loop, both under the lock.
        self._files: dict[str, FailedFile] = {}
        self._lock = Lock()

    @property
    def files(self) -> dict[str, FailedFile]:
        with self._lock:
            return dict(self._files)

    @property
    def events(self) -> int:
        return sum(file.events for file in self.files.values())

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())

    def tags(self) -> set[str]:
        """Return the tags of the owners of all files in failed/. Blocks."""
        return {name.tag for name in map(parse, self._fs.list_dir(self.directory)) if name}

    def without_reasons(self, tags: set[str]) -> list[Name]:
        """Return the files of these owners that have no reasons. Blocks.

        Queen MQ moves all files here while the database is down.
        """
        entries = set(self._fs.list_dir(self.directory))
        names = [parse(text) for text in entries if f"{text}.error" not in entries]
        return [name for name in names if name and name.tag in tags]

    def adopt(self, tags: set[str]) -> None:
        """Adopt the files of these owners. They are due at once. Blocks."""
        for text in self._fs.list_dir(self.directory):
            name = parse(text)
            if name and name.tag in tags and text not in self.files:
                path = self.directory / text
                reason = self._reason_beside(path)
                self._add(name, path, count_events(self._fs, path), time.monotonic(), reason)

    def _reason_beside(self, path: Path) -> str:
        """Return why the first event of a failed file was rejected. Blocks."""
        try:
            lines = self._fs.read(path.with_name(path.name + ".error")).splitlines()
        except FileNotFoundError:
            return "unknown: the file with the reasons is missing"
        return lines[0].decode(errors="replace") if lines else "unknown"

    def write(self, name: Name, refusals: list[RefusedEvent]) -> None:
        """Write the rejected events of the file `name` durably. Idempotent. Blocks."""
        path = self.directory / str(name.complete)
        reasons = path.with_name(path.name + ".error")
        if not refusals:
            self._fs.remove(path)
            self._fs.remove(reasons)
            with self._lock:
                self._files.pop(str(name.complete), None)
            return
        self._fs.make_dir(self.directory)
        self._fs.replace(
            reasons,
            b"".join(_reason(number, refusal) for number, refusal in enumerate(refusals, 1)),
        )
        self._fs.replace(path, b"".join(self._storage.encode(refusal.item for refusal in refusals)))
        due = time.monotonic() + self._interval
        self._add(name.complete, path, len(refusals), due, refusals[0].error)

    def _add(self, name: Name, path: Path, events: int, due: float, reason: str) -> None:
        size = self._fs.size(path)
        with self._lock:
            before = self._files.get(str(name))
            pause = before.pause if before else self._interval
            self._files[str(name)] = FailedFile(
                name, path, events, size, due=due, pause=pause, reason=reason
            )

    def due(self, *, now: bool = False) -> list[FailedFile]:
        """Return the files that are due, or all of them, oldest first."""
        moment = time.monotonic()
        return sorted(
            (file for file in self.files.values() if now or file.due <= moment),
            key=lambda file: str(file.name),
        )

    @property
    def next_due(self) -> float:
        """Return when the next file is due, on the monotonic clock."""
        return min((file.due for file in self.files.values()), default=float("inf"))

    def postpone(self, file: FailedFile) -> None:
        """Delay a file of which events were rejected again."""
        file.pause = min(file.pause * 2, max(MAX_FAILED_PAUSE_SECONDS, self._interval))
        file.due = time.monotonic() + file.pause


def _reason(number: int, refusal: RefusedEvent) -> bytes:
    names = ("queue", "partition", "transaction_id")
    event = {name: getattr(refusal.item, name) for name in names}
    return msgspec.json.encode({"line": number} | event | {"error": refusal.error}) + b"\n"
