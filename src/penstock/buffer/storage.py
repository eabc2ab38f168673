"""The buffer's directory: new files, their encoding, and the space that is left."""

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeVar

from penstock.buffer.backlog import BufferFile
from penstock.buffer.events import encode
from penstock.buffer.files import Kind, Namer
from penstock.config import schema
from penstock.errors import StorageError, StorageFull
from penstock.io.fs import File, Fs
from penstock.queues.types import Item

T = TypeVar("T")
SPACE_CHECK_SECONDS = 0.05  # between two queries of the free space


class BufferStorage:
    """The files of one buffer. `at_rest` encrypts an item if its queue is encrypted."""

    def __init__(
        self,
        directory: Path,
        fs: Fs,
        pool: Executor,
        settings: schema.BufferSettings,
        at_rest: Callable[[Item], Item],
    ) -> None:
        self.directory = directory
        self.fs = fs
        self.pool = pool
        self.settings = settings
        self._at_rest = at_rest
        self.namer = Namer()
        self.used: Callable[[], int] = lambda: 0  # bytes in files of this process
        self._room = 0  # bytes that may be written before the free space is queried again
        self._check_at = 0.0  # when it is queried again in any case

    def create(self, kind: Kind) -> tuple[BufferFile, File]:
        """Create a file. The name of a failover file survives a power failure."""
        name = self.namer.next(kind)
        path = self.directory / str(name)
        handle = self.fs.open(path, create=True)
        try:
            if kind == "failover":
                self.fs.sync_dir(self.directory)
        except StorageError:
            handle.close()
            self.fs.remove(path)
            raise
        return BufferFile(name, path), handle

    def encode(self, items: Iterable[Item]) -> list[bytes]:
        return encode(map(self._at_rest, items))

    def reserve(self, more: int) -> None:
        """Reserve space for `more` bytes. Raise StorageFull if they exceed a limit."""
        now = time.monotonic()
        # a query for each push would cost more than its write
        if now > self._check_at or self._room < more:
            settings = self.settings
            used, free = self.used(), self.fs.free_bytes(self.directory)
            if used + more > settings.max_bytes:
                raise StorageFull(
                    f"the buffer is full: {used} of {settings.max_bytes} bytes are used"
                )
            if free - more < settings.free_space_reserve:
                raise StorageFull("the disk of the buffer is full")
            self._room = min(settings.max_bytes - used, free - settings.free_space_reserve)
            self._check_at = now + SPACE_CHECK_SECONDS
        self._room -= more

    async def in_pool(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *args)
