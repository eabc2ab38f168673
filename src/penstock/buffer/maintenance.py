"""Maintenance modes: pushes stay in the buffer, and pops get no messages.

The modes belong to the database: all its brokers follow the table `settings`, by NOTIFY. Each keeps
a copy in `maintenance.json` in its buffer directory, for a start while the database is down. A mode
that is switched while the database is down applies to this broker at once, and is written to the
database when it is back.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.database import Database
from penstock.database.retry import BACKGROUND_SECONDS
from penstock.errors import StorageError, Unavailable
from penstock.io.fs import Fs
from penstock.io.tasks import cancelled, supervised
from penstock.metrics import Metrics

log = logging.getLogger("penstock.buffer")

CHANNEL = "penstock_settings"
NAME = "maintenance"
READ = "SELECT value::text FROM settings WHERE name = $1"
WRITE = """
    WITH changed AS (
        INSERT INTO settings (name, value) VALUES ($1, $2::text::jsonb)
        ON CONFLICT (name) DO UPDATE SET value = excluded.value, changed_at = now()
    )
    SELECT pg_notify($3, $1)
"""


class Modes(msgspec.Struct, frozen=True):
    push: bool = False
    pop: bool = False


class Maintenance:
    """Follow the modes in the database, and call `changed` when they change."""

    def __init__(
        self,
        database: Database,
        directory: Path,
        fs: Fs,
        metrics: Metrics,
        changed: Callable[[], None],
    ) -> None:
        self._database, self._fs, self._changed = database, fs, changed
        self._metrics = metrics
        self._path = directory / "maintenance.json"
        self.modes = Modes()
        self._unsaved = False  # switched while the database was down
        self._switches = 0  # counts beginnings and ends, to detect a read that overlaps a switch
        self._switching = 0  # switches that have begun and not ended
        self._stale = False  # there was a change since the last read began
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._load()
        self._stale = True
        await self._follow()
        await self._database.listen(CHANNEL, self.settings_changed)

    async def stop(self) -> None:
        await cancelled(self._reading)

    async def switch(self, *, push: bool | None = None, pop: bool | None = None) -> None:
        """Set one or both modes: here at once, and on other brokers through the database."""
        modes = Modes(
            self.modes.push if push is None else push, self.modes.pop if pop is None else pop
        )
        self._switches += 1
        self._switching += 1
        self._apply(modes)
        try:
            await self._write()
        except Unavailable:
            self._unsaved = True
            log.warning(
                "maintenance switched while the database is down: "
                "the other brokers follow when it is back"
            )
        finally:
            self._switching -= 1
            self._switches += 1
            # repeat a read that overlapped the switch, or a write whose connection was lost
            self.settings_changed(None)

    def settings_changed(self, name: str | None) -> None:
        """Read the modes again. None: a notification may have been missed."""
        if name in (None, NAME):
            self._stale = True  # a read that is under way may return the old modes
            if self._reading is None or self._reading.done():
                self._reading = supervised("maintenance modes", self._follow, self._metrics)

    async def _follow(self) -> None:
        while self._stale and self._database.healthy:  # called again when it is back
            self._stale = False
            try:
                await self._read()
            except Exception as error:
                self._stale = True
                if not isinstance(error, Unavailable):
                    raise
                await asyncio.sleep(BACKGROUND_SECONDS)

    async def _read(self) -> None:
        if self._unsaved:
            await self._write()
            return
        switches = self._switches
        rows = await self._database.fetch(READ, NAME)
        if self._switching or self._switches != switches:
            return  # the rows may be older than the switch, which reads the modes again
        self._apply(msgspec.json.decode(rows[0][0], type=Modes) if rows else Modes())

    async def _write(self) -> None:
        await self._database.fetch(WRITE, NAME, msgspec.json.encode(self.modes).decode(), CHANNEL)
        self._unsaved = False

    def _apply(self, modes: Modes) -> None:
        if modes == self.modes:
            return
        self.modes = modes
        log.log(
            logging.WARNING if modes.push or modes.pop else logging.INFO,
            "maintenance: pushes go to %s, pops %s",
            "the buffer" if modes.push else "the database",
            "get no messages" if modes.pop else "work",
        )
        try:
            self._fs.replace(self._path, msgspec.json.encode(modes))
        except StorageError as error:
            log.error("the maintenance mode cannot be saved: %s", error)
        self._changed()

    def _load(self) -> None:
        if self._fs.exists(self._path):
            try:
                self.modes = msgspec.json.decode(self._fs.read(self._path), type=Modes)
                self._changed()
            except (msgspec.DecodeError, StorageError) as error:
                log.error(
                    "%s cannot be read (%s): maintenance is off until the database can be read",
                    self._path,
                    error,
                )
