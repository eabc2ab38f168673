"""Where a backup lies: a directory or an object store, through `obstore`.

The names in it are paths with `/`. Every file is written whole or not at all.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, NotFound, StorageFailed, Unavailable

PART_BYTES = 8 << 20
SCHEMES = ("s3://", "gs://", "az://", "file://")


class Place:
    """A directory, or a prefix in an object store. Credentials come from the environment, as the
    cloud's own tools take them (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...).
    """

    def __init__(self, address: str, *, create: bool = True) -> None:
        try:
            import obstore
            from obstore.store import LocalStore, from_url
        except ModuleNotFoundError:
            raise Unavailable("backups need obstore: pip install 'penstock[server]'") from None
        self.address = address
        self._obstore: Any = obstore
        self.directory: Path | None = None  # None: an object store
        self._store: Any
        if "://" not in address or address.startswith("file://"):
            self.directory = Path(address.removeprefix("file://")).absolute()
            if not create and not self.directory.is_dir():
                raise NotFound(f"there is no directory {self.directory}")
            self._store = LocalStore(self.directory, mkdir=True)
            return
        if not address.startswith(SCHEMES):
            raise ConfigError(f"{address}: give a directory, or one of {', '.join(SCHEMES)}")
        options: Any = {"allow_http": True} if _plain_endpoint() else {}
        try:
            self._store = from_url(address, client_options=options)
        except Exception as error:
            raise ConfigError(f"{address}: {error}") from error

    def names(self) -> set[str]:
        """Everything that is there."""
        try:
            return {item["path"] for page in self._obstore.list(self._store) for item in page}
        except Exception as error:
            raise self._failure("list", "", error) from error

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        try:
            self._obstore.put(self._store, name, _sized(parts), chunk_size=PART_BYTES)
        except Exception as error:
            raise self._failure("write", name, error) from error

    def read(self, name: str) -> Iterator[bytes]:
        """The content, in parts."""
        try:
            for part in self._obstore.get(self._store, name).stream(min_chunk_size=PART_BYTES):
                yield bytes(part)
        except FileNotFoundError:
            raise NotFound(f"{self.address} has no {name}") from None
        except Exception as error:
            raise self._failure("read", name, error) from error

    def sync(self) -> None:
        """Make what was written durable; an object store's answer says that it is."""
        if self.directory is not None:
            for path in (*self.directory.rglob("*"), self.directory):
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    def _failure(self, verb: str, name: str, error: Exception) -> StorageFailed:
        return StorageFailed(f"cannot {verb} {self.address}/{name}: {error}")


def _plain_endpoint() -> bool:
    return os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")


def _sized(parts: Iterable[bytes]) -> Iterator[bytes]:
    """An iterator, also of a list; an empty file is one empty part."""
    empty = True
    for part in parts:
        empty = False
        yield part
    if empty:
        yield b""
