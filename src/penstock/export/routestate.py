"""The state of a route that survives a restart, in `route.json` of its directory.

paused, refused   why it is paused (null: it is not), and whether its destination denied it
draining          whether it accepts no new records
incarnations      of the topic that it reads: the n-th is the n-th generation of positions
life              of its queue: 32 random bits, which are part of the keys of batches
holder            48 bits that mark its leases on a queue, so that the next process finds them
definition        of a route that was created over the API
"""

import asyncio
import logging
import random
from pathlib import Path
from typing import Annotated, Any

import msgspec

from penstock.errors import StorageError
from penstock.export.context import RouteContext
from penstock.export.health import Pause

log = logging.getLogger("penstock.export")
STATE = "route.json"
SAVE_RETRY_SECONDS = 5.0


class SavedState(msgspec.Struct):
    """The content of `route.json`."""

    paused: str | None = None
    refused: bool = False
    draining: bool = False
    incarnations: list[str] = []
    life: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    holder: int = 0
    definition: dict[str, Any] | None = None


def read_state(context: RouteContext, directory: Path) -> SavedState:
    """Return the saved state. If the file is damaged, log that and return an empty state."""
    path = directory / STATE
    if context.fs.exists(path):
        try:
            return msgspec.json.decode(context.fs.read(path), type=SavedState)
        except ValueError as error:
            log.error("%s is damaged and ignored: %s", path, error)
    return SavedState()


class RouteState:
    """The state of one route. Writes are made one after the other, so the file has the latest."""

    def __init__(
        self,
        route: str,
        directory: Path,
        context: RouteContext,
        pause: Pause,
        definition: dict[str, Any] | None,
    ) -> None:
        self._route = route
        self._directory = directory
        self._context = context
        self._pause = pause
        self._definition = definition
        self.draining = False  # requested by an operator
        self.life = 0
        self.holder = 0
        self._incarnations: list[str] = []
        self._unsaved = False  # the file is older than the state
        self._stopping = False
        self._saving = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, *, new_life: bool) -> None:
        """Restore the saved state. `new_life`: the queue starts its sequence numbers at 1 again."""
        saved = await self._context.in_pool(read_state, self._context, self._directory)
        self.draining, self._incarnations = saved.draining, saved.incarnations
        self.life, self.holder = saved.life, saved.holder
        if saved.paused is not None:
            self._pause.begin(saved.paused, denied=saved.refused)
        if not self.life or not self.holder:
            self.life = self.life or random.getrandbits(32)
            self.holder = self.holder or random.getrandbits(48)
            await self.save_or_retry()
        if new_life:
            self.life = random.getrandbits(32)

    async def generation_of(self, incarnation: str) -> int:
        """Return the number of this incarnation of the topic, from 0; save a new one first."""
        if incarnation not in self._incarnations:
            self._incarnations.append(incarnation)
            try:
                await self.save()
            except StorageError:
                self._incarnations.remove(incarnation)
                raise
        return self._incarnations.index(incarnation)

    async def save(self) -> None:
        async with self._saving:
            state = SavedState(
                paused=self._pause.reason,
                refused=self._pause.denied,
                draining=self.draining,
                incarnations=self._incarnations,
                life=self.life,
                holder=self.holder,
                definition=self._definition,
            )
            data = msgspec.json.format(msgspec.json.encode(state))
            self._unsaved = True
            await self._context.in_pool(self._context.fs.make_dir, self._directory)
            await self._context.in_pool(self._context.fs.replace, self._directory / STATE, data)
            self._unsaved = False

    async def save_or_retry(self) -> None:
        """Save the state; repeat that while the disk fails. The state applies meanwhile."""
        try:
            await self.save()
        except StorageError as error:
            log.error("route %s: its state cannot be saved, trying again: %s", self._route, error)
            if not self._stopping:
                self._context.clock.call_later(SAVE_RETRY_SECONDS, self.save_soon)

    def save_soon(self) -> None:
        if not self._stopping:
            task = asyncio.create_task(self.save_or_retry())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Write the state, if possible."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        if self._unsaved:
            await self.save_or_retry()
