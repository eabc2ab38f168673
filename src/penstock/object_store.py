"""Store files in a directory or an object store, through `obstore`. Backups and the tier use it.

Names are paths with `/`. Every file is written whole or not at all. `put_if` is the only write that
two writers may race for: it replaces the version that the caller has read, or creates a new file,
and otherwise raises `Conflict`. In a directory, a lock file makes that operation atomic.

    document with a checksum: JSON, a newline, 8 hexadecimal digits of its CRC32C, a newline
"""

import fcntl
import heapq
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from crc32c import crc32c

from penstock.errors import (
    ConfigError,
    Conflict,
    Damaged,
    NotFound,
    StorageFailed,
    Unavailable,
)
from penstock.protocol.names import is_relative_path

PART_BYTES = 8 << 20
PARTS_IN_FLIGHT = 4  # of one upload: bounds the memory that it takes
SCHEMES = ("s3://", "gs://", "az://", "file://")
ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")  # in the environment
LOCK = "lock"  # the name of the lock file of a directory
_INTERRUPTED = re.compile(r".+#\d+")  # unfinished files in a directory, also those of obstore

T = TypeVar("T")


class ObjectInfo(NamedTuple):
    name: str
    size: int
    modified: datetime


class Version(NamedTuple):
    """The version of an object, as its store identifies it."""

    e_tag: str | None
    number: str | None


class RequestLimits(NamedTuple):
    """The number of attempts of a request, and the time limit of each."""

    attempts: int
    seconds: float


class ObjectStore:
    """A directory, or a prefix in an object store. Credentials come from the environment, under the
    names that the cloud's own tools use (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...).

    Its methods block, and may be called from several threads.
    """

    def __init__(
        self, address: str, *, create: bool = True, limits: RequestLimits | None = None
    ) -> None:
        try:
            import obstore
            from obstore.store import LocalStore, from_url
        except ModuleNotFoundError:
            raise Unavailable(f"{address} needs obstore: pip install 'penstock[server]'") from None
        self.address = address
        self._obstore: Any = obstore
        self.directory: Path | None = None  # None: an object store
        self._store: Any
        if address.startswith("file://") and not address.startswith("file:///"):
            raise ConfigError(
                f"{address}: a path after file:// is absolute, as in file:///srv/tier"
            )
        if "://" not in address or address.startswith("file://"):
            self.directory = Path(address.removeprefix("file://")).absolute()
            if not create and not self.directory.is_dir():
                raise NotFound(f"directory {self.directory} does not exist")
            self._store = LocalStore(self.directory, mkdir=True)
            return
        if not address.startswith(SCHEMES):
            raise ConfigError(f"{address}: give a directory, or one of {', '.join(SCHEMES)}")
        if "?" in address or "#" in address:  # they would end the prefix silently
            raise ConfigError(f"{address}: a prefix has no ? and no #")
        client: dict[str, Any] = {"allow_http": True} if _plain_endpoint() else {}
        more: dict[str, Any] = {}
        if limits is not None:
            seconds = timedelta(seconds=limits.seconds)
            client |= {"timeout": seconds, "connect_timeout": seconds}
            more["retry_config"] = {
                "max_retries": limits.attempts - 1,
                "retry_timeout": seconds * limits.attempts,
            }
        try:
            connect: Any = from_url  # it has a signature for each kind of store
            self._store = connect(address, client_options=client, **more)
        except Exception as error:
            raise ConfigError(f"{address}: {_reason(error)}") from error

    def _path(self, name: str) -> Path:
        """Return the path of a file. Check the name, since manifests may be forged."""
        assert self.directory is not None
        if not is_relative_path(name):
            raise Damaged(f"{self.address}: {name!r} is not the name of a file in it")
        return self.directory / name

    def names(self) -> set[str]:
        return {item.name for item in self.list()}

    def list(self, prefix: str | None = None, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the files whose names begin with a prefix and sort behind `after`."""
        with self._explained("list", prefix or ""):
            for page in self._obstore.list(self._store, prefix, offset=after):
                for item in page:
                    if item["path"] != LOCK:
                        yield ObjectInfo(item["path"], item["size"], item["last_modified"])

    def list_first(self, prefix: str, after: str, most: int) -> Sequence[ObjectInfo]:
        """Return the first files behind `after`, by name."""
        listed = self.list(prefix, after)
        if self.directory is not None:  # in any order, which in an object store is that of names
            return heapq.nsmallest(most, listed)
        return list(islice(listed, most))

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the content in parts."""
        with self._explained("read", name):
            for part in self._obstore.get(self._store, name).stream(min_chunk_size=PART_BYTES):
                yield bytes(part)

    def read_range(self, name: str, start: int, length: int) -> bytes:
        if not length:
            return b""
        with self._explained("read", name):
            if self.directory is not None:
                with self._path(name).open("rb", buffering=0) as file:
                    return os.pread(file.fileno(), length, start)
            return bytes(self._obstore.get_range(self._store, name, start=start, length=length))

    def get(self, name: str) -> tuple[bytes, Version]:
        """Return a small file and its version."""
        with self._explained("read", name):
            answer = self._obstore.get(self._store, name)
            version = Version(answer.meta.get("e_tag"), answer.meta.get("version"))
            return bytes(answer.bytes()), version

    def size_of(self, name: str) -> int | None:
        """Return the size; None if the file does not exist."""
        return self._head(name).get("size")

    def modified(self, name: str) -> datetime | None:
        """Return the write time by the store's clock; None if the file does not exist."""
        return self._head(name).get("last_modified")

    def _head(self, name: str) -> dict[str, Any]:
        with suppress(NotFound), self._explained("inspect", name):
            return dict(self._obstore.head(self._store, name))
        return {}

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        """Write a file of any size. In a directory it is durable after `sync`."""
        with self._explained("write", name):
            if self.directory is not None:
                _write_file(self._path(name), parts)
                return
            self._obstore.put(
                self._store,
                name,
                _content(parts),
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_IN_FLIGHT,
            )

    def put_if(self, name: str, data: bytes, version: Version | None) -> Version:
        """Replace this version of a small file, or create it (None), durably.

        Raise `Conflict` if the store has another version.
        """
        exceptions = self._obstore.exceptions
        mode: Any = "create"
        if version is not None:
            fields = {"e_tag": version.e_tag, "version": version.number}
            mode = {field: value for field, value in fields.items() if value is not None}
        try:
            if self.directory is not None:
                return self._put_locked(name, data, version)
            done = self._obstore.put(self._store, name, data, mode=mode)
        except (exceptions.PreconditionError, exceptions.AlreadyExistsError):
            raise Conflict(f"{self.address}/{name} was changed by another writer") from None
        except FileNotFoundError:
            raise Conflict(f"{self.address}/{name} was removed by another writer") from None
        except Conflict:
            raise
        except Exception as error:
            raise self._failure("write", name, error) from error
        return Version(done["e_tag"], done["version"])

    def _put_locked(self, name: str, data: bytes, version: Version | None) -> Version:
        with self._locked():
            try:
                present = self._obstore.head(self._store, name)["e_tag"]
            except FileNotFoundError:
                present = None
            if present != (version.e_tag if version is not None else None):
                raise Conflict(f"{self.address}/{name} was changed by another writer")
            done = self._obstore.put(self._store, name, data)
            self.sync([name])
        return Version(done["e_tag"], done["version"])

    @contextmanager
    def _locked(self) -> Iterator[None]:
        assert self.directory is not None
        fd = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; missing ones are ignored."""
        for name in names:
            with suppress(NotFound), self._explained("delete", name):
                self._obstore.delete(self._store, name)

    def discard_interrupted(self) -> None:
        """Remove unfinished files of killed writers from a directory.

        An object store has lifecycle rules for incomplete uploads.
        """
        if self.directory is not None:
            for path in self.directory.rglob("*#*"):
                if _INTERRUPTED.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def sync(self, names: Iterable[str] | None = None) -> None:
        """Make these files, or all files, durable. In an object store they already are."""
        if self.directory is None:
            return
        if names is None:
            paths = [*self.directory.rglob("*"), self.directory]
        else:
            files = [self._path(name) for name in names]
            paths = [*files, *{up for file in files for up in file.parents if self._has(up)}]
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _has(self, path: Path) -> bool:
        return self.directory is not None and path.is_relative_to(self.directory)

    @contextmanager
    def _explained(self, verb: str, name: str) -> Iterator[None]:
        """Convert exceptions of the store to errors of Penstock."""
        try:
            yield
        except Exception as error:
            raise self._failure(verb, name, error) from error

    def _failure(self, verb: str, name: str, error: Exception) -> Exception:
        if isinstance(error, Damaged):
            return error
        if isinstance(error, FileNotFoundError):
            return NotFound(f"{self.address} has no {name}")
        return StorageFailed(f"cannot {verb} {self.address}/{name}: {_reason(error)}")


def _write_file(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file several times as fast as obstore, which copies each part to another thread."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f"{path.name}#{threading.get_ident()}")
    try:
        with staged.open("wb") as file:
            for part in parts:
                file.write(part)
        staged.rename(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def _reason(error: Exception) -> str:
    """Return the message of obstore without its debug output."""
    return str(error).partition("\n\nDebug source")[0]


def _plain_endpoint() -> bool:
    return any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS)


def _content(parts: Iterable[bytes]) -> bytes | Iterator[bytes]:
    """Return small content whole, for one request; otherwise an iterator for a multipart upload."""
    following = iter(parts)
    first: list[bytes] = []
    size = 0
    for part in following:
        first.append(part)
        size += len(part)
        if size > PART_BYTES:
            return chain(first, following)
    return b"".join(first)


def pack_document(document: msgspec.Struct) -> bytes:
    body = msgspec.json.encode(document)
    return body + b"\n%08x\n" % crc32c(body)


def parse_document(data: bytes, kind: type[T], name: str) -> T:
    """Decode a document; raise `Damaged` if its checksum is wrong. Unknown fields are ignored."""
    body, _, check = data.rstrip(b"\n").rpartition(b"\n")
    if b"%08x" % crc32c(body) != check:
        raise Damaged(f"{name} does not match its checksum")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise Damaged(f"{name} does not have the expected format: {error}") from None
