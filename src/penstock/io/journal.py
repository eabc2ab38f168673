"""A journal: a file of lines, each a checksum and a JSON array. A line that was damaged or cut is
recognised and left out.

<8 hexadecimal digits: CRC32C of the rest> <JSON array>\\n

After a failed write its end cannot be trusted: its owner replaces it by a snapshot of what it says,
and does the same when it has grown to several times that.
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
    """What the line says; None when it does not match its checksum."""
    check, _, body = text.partition(b" ")
    with contextlib.suppress(ValueError):
        if len(check) == 8 and int(check, 16) == crc32c(body):
            return json.loads(body)
    return None


def events(data: bytes, fields: Mapping[str, int]) -> tuple[list[list[Any]], int]:
    """What the lines say that have as many fields as their kind, the first one, has; and how many
    lines are damaged."""
    *lines, rest = data.split(b"\n")
    whole = [
        event
        for event in map(parse, lines)
        if isinstance(event, list) and event and len(event) == fields.get(event[0])
    ]
    return whole, len(lines) - len(whole) + bool(rest)


class JournalFile:
    """Blocks."""

    def __init__(self, fs: Fs, path: Path, *, sync: bool) -> None:
        self._fs = fs
        self._path = path
        self._sync = sync
        self._file: File | None = None
        self.size = 0

    def read(self) -> bytes | None:
        """All of it; None when there is none."""
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
