"""The buffer's directory, as all parts that write there share it: where, by whom, and how much."""

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
SPACE_CHECK_SECONDS = 0.05  # how long a look at the free space is good for


class BufferStorage:
    """`at_rest`: an item as it may lie on a disk, which is sealed if its queue is encrypted."""

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
        self._room = 0  # bytes that may be written before we look again,
        self._check_at = 0.0  # or at this time

    def create(self, kind: Kind) -> tuple[BufferFile, File]:
        """A new file of ours to write to; that of a failover is there after a power cut too."""
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
        """Lines for a file."""
        return encode(map(self._at_rest, items))

    def reserve(self, more: int) -> None:
        """Refuse what does not fit under the byte cap or would use up the reserve on the disk."""
        now = time.monotonic()
        # asking for each push would cost more than writing it
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
