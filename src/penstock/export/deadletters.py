"""The dead letters of a route: records no retry will help, with the reason, in a file a person can read.

    deadletters.ndjson    one line per record: <8 hexadecimal digits: CRC32C of the rest> <JSON object>\\n
        {"sequence", "index", "reason", "detail", "attempts", "enqueued", "died", "record", "encoding"}
    `record` is the text of the record, or its base64 when it is no UTF-8 (encoding: "utf-8" or "base64").

A record goes in before its block is settled, and is synced, so a crash in between finds it again; the same record is
not written twice, because (sequence, index) of the lines in the file is remembered. A torn last line is cut at opening.
Replaying moves the file aside, pushes its records as new ones, and removes it when they are accepted.
"""

import base64
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import crc32c

from penstock.errors import StorageFailed, StorageFull
from penstock.storage.fs import File, Fs

log = logging.getLogger("penstock.export")
NAME = "deadletters.ndjson"
REPLAYING = "deadletters.replaying"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    sequence: int
    index: int  # of the record in its batch
    reason: str  # refused | too_large | attempts | expired
    detail: str
    attempts: int
    enqueued: float  # seconds since 1970
    died: float
    record: bytes

    def line(self) -> bytes:
        fields = asdict(self)
        try:
            fields["record"], fields["encoding"] = self.record.decode(), "utf-8"
        except UnicodeDecodeError:
            fields["record"], fields["encoding"] = base64.b64encode(self.record).decode(), "base64"
        text = json.dumps(fields, ensure_ascii=False).encode()
        return b"%08x %s\n" % (crc32c.crc32c(text), text)


def parse_line(line: bytes) -> DeadLetter | None:
    try:
        checksum, text = line.rstrip(b"\n").split(b" ", 1)
        if int(checksum, 16) != crc32c.crc32c(text):
            return None
        fields = json.loads(text)
        record = fields.pop("record")
        fields["record"] = base64.b64decode(record) if fields.pop("encoding") == "base64" else record.encode()
        return DeadLetter(**fields)
    except (ValueError, TypeError, KeyError):
        return None


def read_letters(data: bytes) -> Iterator[DeadLetter | None]:
    """Every line; None for a damaged one."""
    for line in data.splitlines(keepends=True):
        yield parse_line(line)


class DeadLetters:
    """Blocking; called from the pool."""

    def __init__(self, fs: Fs, directory: Path | None) -> None:
        self._fs, self._directory = fs, directory
        self._file: File | None = None
        self._known: set[tuple[int, int]] = set()
        self._kept: list[DeadLetter] = []  # of a queue that has no directory
        self.count = 0

    def open(self) -> None:
        if self._directory is None:
            return
        data = self._read(NAME)
        torn = len(data) - (data.rfind(b"\n") + 1)
        letters = list(read_letters(data[: len(data) - torn]))
        damaged = letters.count(None)
        if damaged or torn:
            log.warning("%s: %d damaged lines, %d torn bytes cut", self._directory / NAME, damaged, torn)
        if torn:
            file = self._fs.open(self._directory / NAME)
            file.truncate(len(data) - torn)
            file.close()
        self._known = {(letter.sequence, letter.index) for letter in letters if letter is not None}
        self.count = len(letters)

    def _read(self, name: str) -> bytes:
        assert self._directory is not None
        path = self._directory / name
        return self._fs.read(path) if self._fs.exists(path) else b""

    def add(self, letters: list[DeadLetter]) -> None:
        """Durable when it returns. Raises StorageFull or StorageFailed and has added nothing that counts."""
        new = [letter for letter in letters if (letter.sequence, letter.index) not in self._known]
        if not new:
            return
        if self._directory is None:
            self._kept += new
        else:
            if self._file is None:
                self._fs.make_dir(self._directory)
                self._file = self._fs.open(self._directory / NAME, create=True)
                self._fs.sync_dir(self._directory)
            try:
                self._file.append([letter.line() for letter in new])
                self._file.sync()
            except (StorageFull, StorageFailed):
                self._file.close()
                self._file = None  # a file whose sync failed takes no more: open it anew next time
                raise
        self._known |= {(letter.sequence, letter.index) for letter in new}
        self.count += len(new)

    def letters(self) -> list[DeadLetter]:
        """All that can be read, those of an interrupted replay first."""
        if self._directory is None:
            return list(self._kept)
        data = self._read(REPLAYING) + self._read(NAME)
        return [letter for letter in read_letters(data) if letter is not None]

    def begin_replay(self) -> list[DeadLetter]:
        """Move the letters aside and return them; `end_replay` when they are accepted elsewhere."""
        if self._directory is None:
            letters, self._kept = self._kept, []
            self._known, self.count = set(), 0
            return letters
        if self._file is not None:
            self._file.close()
            self._file = None
        if not self._fs.exists(self._directory / REPLAYING):
            if not self._fs.exists(self._directory / NAME):
                return []
            self._fs.rename(self._directory / NAME, self._directory / REPLAYING)
            self._fs.sync_dir(self._directory)
        self._known = set()
        data = self._read(REPLAYING)
        return [letter for letter in read_letters(data) if letter is not None]

    def end_replay(self) -> None:
        if self._directory is not None:
            self._fs.remove(self._directory / REPLAYING)
            self._fs.sync_dir(self._directory)
            self.count = len(list(read_letters(self._read(NAME))))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
