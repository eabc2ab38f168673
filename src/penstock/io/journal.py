"""A journal: a file of lines, each with a checksum and a JSON array.

<8 hexadecimal digits: CRC32C of the rest> <JSON array>\\n

Damaged and torn lines are skipped. After a failed write, the end of the file cannot be trusted, and
the owner replaces the file by a snapshot of its content. The owner also does so when the file has
grown to several times the size of the snapshot.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crc32c import crc32c

from penstock.io.fs import File, Fs

SNAPSHOT_BYTES = 1 << 20  # a journal smaller than this is never replaced
SNAPSHOT_FACTOR = 8


def line(event: list[Any]) -> bytes:
    body = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
    return b"%08x %b\n" % (crc32c(body), body)


def parse(text: bytes) -> Any:
    """Return the array of a line; None if it does not match its checksum."""
    check, _, body = text.partition(b" ")
    with contextlib.suppress(ValueError):
        if len(check) == 8 and int(check, 16) == crc32c(body):
            return json.loads(body)
    return None


def events(data: bytes, fields: Mapping[str, int]) -> tuple[list[list[Any]], int]:
    """Return the valid events, and the number of damaged lines.

    An event is valid if it has the number of fields that `fields` gives for its kind.
    """
    *lines, rest = data.split(b"\n")
    whole = [
        event
        for event in map(parse, lines)
        if isinstance(event, list) and event and len(event) == fields.get(event[0])
    ]
    return whole, len(lines) - len(whole) + bool(rest)


class JournalFile:
    """Read, append and replace a journal. All methods block."""

    def __init__(self, fs: Fs, path: Path, *, sync: bool) -> None:
        self._fs = fs
        self._path = path
        self._sync = sync
        self._file: File | None = None
        self.size = 0

    def read(self) -> bytes | None:
        """Return the whole content; None if the file does not exist."""
        try:
            data = self._fs.read(self._path)
        except FileNotFoundError:
            return None
        self.size = len(data)
        return data

    def append(self, lines: bytes) -> None:
        if self._file is None:
            fresh = not self._fs.exists(self._path)
            self._file = self._fs.open(self._path, create=True)
            if fresh and self._sync:
                self._fs.sync_dir(self._path.parent)
        self._file.append([lines])
        if self._sync:
            self._file.sync()
        self.size = self._file.size

    def replace(self, snapshot: bytes) -> None:
        self._fs.replace(self._path, snapshot, sync=self._sync)
        self.close()
        self.size = len(snapshot)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
