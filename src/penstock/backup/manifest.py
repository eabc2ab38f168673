"""The manifest of a backup: its files, their checksums, and a checksum of its own."""

from collections.abc import Callable, Iterable, Iterator

import msgspec
from crc32c import crc32c

from penstock.errors import Damaged, InvalidRequest
from penstock.object_store import pack_document, parse_document
from penstock.protocol.names import is_relative_path, is_topic_name

NAME = "manifest.json"
FORMAT = 1
OBJECTS = "shared"  # of shared topics, under the names that they have in the object store
DIRECTORIES = (
    "topics",
    "private",
    "buffers",
    "routes",
    OBJECTS,
)  # of a backup; the rest are single files
Progress = Callable[[str, int, int], None]  # name of the file, bytes copied, bytes expected


class BackupFile(msgspec.Struct, frozen=True):
    size: int
    crc32c: int


class BackupManifest(msgspec.Struct):
    version: str  # of Penstock
    began_at: str
    ended_at: str = ""
    database_schema: str = ""  # empty: no queues in it
    topics: dict[str, int] = {}  # name -> next offset
    files: dict[str, BackupFile] = {}
    tier: str = ""  # the tier with older segments that are not in the backup
    shared_tier: str = ""  # the object storage with records of shared topics that are not in it
    format: int = FORMAT

    def pack(self) -> bytes:
        return pack_document(self)

    @classmethod
    def parse(cls, data: bytes) -> "BackupManifest":
        manifest = parse_document(data, cls, NAME)
        if manifest.format != FORMAT:
            raise InvalidRequest(
                f"this backup has format {manifest.format}, made by Penstock {manifest.version}: "
                "restore it with that release"
            )
        for name in manifest.files:
            if not _is_file_name(name):
                raise Damaged(f"{NAME} has a file that is not part of a backup: {name!r}")
        for topic in manifest.topics:
            if not is_topic_name(topic):
                raise Damaged(f"{NAME} has an invalid name of a topic: {topic!r}")
        return manifest


def _is_file_name(name: str) -> bool:
    """Check a path before anything is read or created there: a restore writes to it."""
    top, _, rest = name.partition("/")
    if top == "topics":
        topic, _, rest = rest.partition("/")
        return is_topic_name(topic) and is_relative_path(rest)
    return is_relative_path(name) and (bool(rest) or top not in DIRECTORIES)


class Meter:
    """Measure files while they are copied, and report progress."""

    def __init__(self, progress: Progress | None, expected: int = 0) -> None:
        self.files: dict[str, BackupFile] = {}  # files that were copied
        self.expected = expected  # bytes to copy, as far as known
        self._progress = progress
        self._copied = 0  # bytes

    def measured(self, name: str, parts: Iterable[bytes]) -> Iterator[bytes]:
        size = checksum = 0
        for part in parts:
            size += len(part)
            checksum = crc32c(part, checksum)
            self._copied += len(part)
            if self._progress:
                self._progress(name, self._copied, max(self.expected, self._copied))
            yield part
        self.files[name] = BackupFile(size, checksum)
