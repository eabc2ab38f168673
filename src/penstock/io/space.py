"""Refuse writes before a disk is full, and report that state.

A reserve stays free for checkpoints, rolls and removals. The free space is queried at most every
`CHECK_SECONDS`; in between, reserved bytes are subtracted. The first refusal (by this class or by
the disk) is logged and sets `full` to the reason. `full` is cleared when the refused bytes fit and
the disk has more free space than at the refusal. If the disk refuses writes although it reports
free space (a quota), `full` is cleared after `QUIET_SECONDS` without a refusal.
"""

import logging
import time
from pathlib import Path

from penstock.errors import StorageFull
from penstock.io.fs import Fs

log = logging.getLogger("penstock.storage")

CHECK_SECONDS = 0.25
QUIET_SECONDS = 10.0


class Space:
    """The space of one directory. `what` names the refused writes, such as "appends to topics"."""

    def __init__(self, fs: Fs, directory: Path, reserve: int, what: str) -> None:
        self._fs = fs
        self._directory = directory
        self._reserve = reserve
        self._what = what
        self._free = 0  # at the last query, less the bytes reserved since
        self._asked = -CHECK_SECONDS
        self._full: str | None = None
        self._wanted = 0  # bytes that were refused last
        self._refused_at = 0.0
        self._free_then = 0  # free bytes at the first refusal

    def take(self, size: int) -> None:
        """Reserve `size` bytes. Raises StorageFull if they do not fit."""
        if time.monotonic() >= self._asked + CHECK_SECONDS or self._free - size < self._reserve:
            self._refresh()
        if self._free - size < self._reserve:
            error = StorageFull(
                f"the disk has {self._free} bytes free, "
                f"of which {self._reserve} are kept in reserve"
            )
            self.refused(error, size)
            raise error
        self._free -= size

    def refused(self, error: StorageFull, size: int) -> None:
        """Record that `size` bytes were refused."""
        if self._full is None:
            log.warning("%s are refused until there is room: %s", self._what, error)
            self._free_then = self._fs.free_bytes(self._directory)
            self._full = str(error)
        self._wanted = size
        self._refused_at = time.monotonic()

    @property
    def full(self) -> str | None:
        """Return why writes are refused, or None if they are not."""
        self.check()
        return self._full

    def check(self) -> None:
        """Clear `full` if there is room again."""
        if self._full is not None and time.monotonic() >= self._asked + CHECK_SECONDS:
            self._refresh()

    def _refresh(self) -> None:
        now = time.monotonic()
        self._free, self._asked = self._fs.free_bytes(self._directory), now
        if self._full is None or self._free - self._wanted < self._reserve:
            return
        if self._free > self._free_then or now >= self._refused_at + QUIET_SECONDS:
            self._full = None
            log.warning("%s are accepted again: the disk has %d bytes free", self._what, self._free)
