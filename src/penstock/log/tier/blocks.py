"""Keep blocks of the tier's files on the local disk, or in memory for a short-lived reader."""

from contextlib import closing
from pathlib import Path
from typing import Protocol

from penstock.io.fs import Fs

Key = tuple[str, int]  # object, number of the block


class Blocks(Protocol):
    """A store of blocks. Several threads use it, but only one at a time for each key."""

    def clear(self) -> None: ...

    def put(self, key: Key, data: bytes) -> None: ...

    def get(self, key: Key, start: int, stop: int) -> bytes | None:
        """Return a part of a block; None if the block is missing."""

    def remove(self, key: Key) -> None: ...


class BlocksInMemory:
    def __init__(self) -> None:
        self._blocks: dict[Key, bytes] = {}

    def clear(self) -> None:
        self._blocks.clear()

    def put(self, key: Key, data: bytes) -> None:
        self._blocks[key] = data

    def get(self, key: Key, start: int, stop: int) -> bytes | None:
        block = self._blocks.get(key)
        return None if block is None else block[start:stop]

    def remove(self, key: Key) -> None:
        self._blocks.pop(key, None)


class BlocksOnDisk:
    """Blocks in a file each. The files have no meaning after the process ends."""

    def __init__(self, directory: Path, fs: Fs) -> None:
        self._directory = directory
        self._fs = fs

    def _path(self, key: Key) -> Path:
        return self._directory / f"{key[0].replace('/', '-')}-{key[1]}"

    def clear(self) -> None:
        """Remove all files one by one. The directory cannot be removed as a whole while an earlier
        read-ahead still writes to it.
        """
        self._fs.make_dir(self._directory)
        for name in self._fs.list_dir(self._directory):
            self._fs.remove(self._directory / name)

    def put(self, key: Key, data: bytes) -> None:
        self._fs.replace(self._path(key), data, sync=False)

    def get(self, key: Key, start: int, stop: int) -> bytes | None:
        try:
            with closing(self._fs.open(self._path(key), write=False)) as file:
                return file.read_at(start, stop - start)
        except FileNotFoundError:
            return None

    def remove(self, key: Key) -> None:
        self._fs.remove(self._path(key))
