"""The dead letters of a route: records that cannot be delivered, each with the reason, in a file
that people can read.

    deadletters.ndjson    one line per record: <CRC32C of the rest: 8 hex digits> <JSON object>\\n
        {"sequence", "index", "reason", "detail", "attempts", "enqueued", "died", "record",
         "encoding"}
    `record` is the text of the record (encoding "utf-8"), or its base64 if it is not UTF-8.

A record is written and synced before its block is completed. After a crash in between, it is not
written again, since the (sequence, index) of all lines is remembered. A torn last line is cut when
the file is opened. A replay moves the file aside, pushes its records as new ones, and removes it
when they are accepted. Damaged lines cannot be replayed and are moved to `quarantine/`.
"""

import base64
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import crc32c

from penstock.errors import StorageError
from penstock.io import journal
from penstock.io.fs import File, Fs

log = logging.getLogger("penstock.export")
NAME = "deadletters.ndjson"
REPLAYING = "deadletters.replaying"
QUARANTINE = "quarantine"


@dataclass(frozen=True, slots=True)
class DeadRecord:
    sequence: int
    index: int  # of the record in its batch
    reason: str  # refused | too_large | attempts | expired
    detail: str
    attempts: int
    enqueued: float  # seconds since 1970
    died: float
    record: bytes

    @property
    def key(self) -> tuple[int, int]:
        return self.sequence, self.index

    def line(self) -> bytes:
        text = json.dumps(asdict(self) | as_text(self.record), ensure_ascii=False).encode()
        return b"%08x %s\n" % (crc32c.crc32c(text), text)


def as_text(record: bytes) -> dict[str, str]:
    try:
        return {"record": record.decode(), "encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"record": base64.b64encode(record).decode(), "encoding": "base64"}


def from_text(record: str, encoding: str) -> bytes:
    return base64.b64decode(record) if encoding == "base64" else record.encode()


def parse_line(line: bytes) -> DeadRecord | None:
    fields = journal.parse(line.rstrip(b"\n"))
    try:
        fields["record"] = from_text(fields["record"], fields.pop("encoding"))
        return DeadRecord(**fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def read_letters(data: bytes) -> Iterator[DeadRecord | None]:
    """Yield the record of each line; None for a damaged line."""
    return map(parse_line, data.splitlines(keepends=True))


class DeadRecords:
    """The dead letters of a route. Blocks. Thread-safe: the lock protects the files."""

    def __init__(self, fs: Fs, directory: Path | None) -> None:
        self._fs = fs
        self._directory = directory
        self._lock = threading.Lock()
        self._file: File | None = None
        self._keys: set[tuple[int, int]] = set()
        self._in_memory = {NAME: bytearray(), REPLAYING: bytearray()}  # without a directory
        self.count = 0

    def open(self) -> None:
        if self._directory is None:
            return
        with self._lock:
            data = self._read(NAME)
            torn = len(data) - (data.rfind(b"\n") + 1)
            letters = list(read_letters(data[: len(data) - torn]))
            damaged = letters.count(None)
            path = self._directory / NAME
            if damaged or torn:
                log.warning("%s: %d damaged lines, %d torn bytes cut", path, damaged, torn)
            if torn:
                file = self._fs.open(path)
                file.truncate(len(data) - torn)
                file.close()
            self._keys = {letter.key for letter in letters if letter is not None}
            self._count()

    def _count(self) -> None:
        self.count = self._read(NAME).count(b"\n") + self._read(REPLAYING).count(b"\n")

    def _read(self, name: str) -> bytes:
        if self._directory is None:
            return bytes(self._in_memory[name])
        path = self._directory / name
        return self._fs.read(path) if self._fs.exists(path) else b""

    def add(self, letters: list[DeadRecord]) -> None:
        """Add records durably. If it raises StorageFull or StorageFailed, it has added none."""
        with self._lock:
            new = [letter for letter in letters if letter.key not in self._keys]
            if new:
                self._append([letter.line() for letter in new])
                self._keys |= {letter.key for letter in new}
                self.count += len(new)

    def _append(self, lines: list[bytes]) -> None:
        if self._directory is None:
            self._in_memory[NAME] += b"".join(lines)
            return
        if self._file is None:
            self._fs.make_dir(self._directory)
            self._file = self._fs.open(self._directory / NAME, create=True)
            self._fs.sync_dir(self._directory)
        try:
            self._file.append(lines)
            self._file.sync()
        except StorageError:
            self._close()  # after a failed sync the file refuses writes: open it again next time
            raise

    def page(self, offset: int, limit: int) -> Sequence[DeadRecord | None]:
        """Return `limit` records from the `offset`-th on, those of an interrupted replay first;
        None stands for a damaged one.
        """
        with self._lock:
            lines = (self._read(REPLAYING) + self._read(NAME)).splitlines(keepends=True)
        return [parse_line(line) for line in lines[offset : offset + limit]]

    def begin_replay(self) -> list[DeadRecord]:
        """Move the letters aside and return them, until `end_replay`. One at a time."""
        with self._lock:
            self._close()
            if not self._read(REPLAYING):
                self._move_aside()
                self._keys = set()
            return [letter for letter in read_letters(self._read(REPLAYING)) if letter is not None]

    def _move_aside(self) -> None:
        if self._directory is None:
            self._in_memory |= {REPLAYING: self._in_memory[NAME], NAME: bytearray()}
        elif self._fs.exists(self._directory / NAME):
            self._fs.rename(self._directory / NAME, self._directory / REPLAYING)
            self._fs.sync_dir(self._directory)

    def end_replay(self) -> None:
        with self._lock:
            if self._directory is None:
                self._in_memory[REPLAYING].clear()
            else:
                self._set_damaged_aside(self._directory)
                self._fs.remove(self._directory / REPLAYING)
                self._fs.sync_dir(self._directory)
            self._count()

    def _set_damaged_aside(self, directory: Path) -> None:
        lines = self._read(REPLAYING).splitlines(keepends=True)
        damaged = [line for line in lines if parse_line(line) is None]
        if damaged:
            place = directory / QUARANTINE
            self._fs.make_dir(place)
            name = f"{NAME}.{crc32c.crc32c(b''.join(damaged)):08x}"
            self._fs.replace(place / name, b"".join(damaged))
            log.error(
                "%s: %d damaged lines cannot be replayed and are in %s",
                place.parent / NAME,
                len(damaged),
                name,
            )

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
