"""Where blocks of the tier's files are kept: on the local disk, or in memory for a short reader."""

from contextlib import closing
from pathlib import Path
from typing import Protocol

from penstock.io.fs import Fs

Key = tuple[str, int]  # object, number of the block


class Blocks(Protocol):
    """Called from several threads, for one key by one of them at a time."""

    def clear(self) -> None: ...

    def put(self, key: Key, data: bytes) -> None: ...

    def get(self, key: Key, start: int, stop: int) -> bytes | None:
        """Return a part of a block; None when it is not there (any more)."""

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
    """A file each, whose names mean nothing: they are forgotten with the process."""

    def __init__(self, directory: Path, fs: Fs) -> None:
        self._directory = directory
        self._fs = fs

    def _path(self, key: Key) -> Path:
        return self._directory / f"{key[0].replace('/', '-')}-{key[1]}"

    def clear(self) -> None:
        """Remove all files, one by one: a directory that a read-ahead from before still writes to
        cannot be removed as a whole.
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
