"""The list of a topic's segments in the tier, with the checksum of every block."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from crc32c import crc32c

from penstock.errors import Damaged
from penstock.io.fs import Fs
from penstock.log.layout import BATCHES, DATA, INDEX, TIER
from penstock.log.limits import TopicLimits
from penstock.object_store import ObjectStore, pack_document, parse_document
from penstock.protocol.names import is_incarnation, is_relative_path, is_topic_name

MANIFEST = "manifest.json"
BLOCK_BYTES = 4 << 20
FORMAT = 1
_ENDINGS = {DATA: ".log", INDEX: ".idx", BATCHES: ".crc"}


class TieredFile(msgspec.Struct, frozen=True):
    size: int
    blocks: bytes  # CRC32C of each block, u32 little-endian

    def checksum(self, number: int) -> int:
        return int.from_bytes(self.blocks[4 * number : 4 * number + 4], "little")


class StoredSegment(msgspec.Struct, frozen=True, kw_only=True):
    stem: str  # common part of its file names
    base: int
    end: int
    rows: int
    newest: int  # append time of its newest record, microseconds
    compacted: bool = False
    # Compaction replaced it on the owner's disk; the replacement is not in the tier yet.
    superseded: bool = False
    block_bytes: int = BLOCK_BYTES
    files: dict[str, TieredFile]  # by kind

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


class TierManifest(msgspec.Struct, kw_only=True):
    """The owner's state of a topic as of its last sealed segment in the tier."""

    tier: str  # id of the tier
    name: str
    incarnation: str
    broker: str = ""  # wrote this version
    version: int = 0  # number of writes
    policy: str
    layout: str = "aiq"  # the format of its segments
    archived: int | None = None
    limits: TopicLimits = TopicLimits()
    segments: list[StoredSegment] = []  # in order of offsets
    checkpoint: bytes = b""  # the topic's `checkpoint` file as of `end`
    damage: list[dict[str, Any]] = []  # the contents of `damage.json`
    format: int = FORMAT

    @property
    def end(self) -> int:
        return self.segments[-1].end if self.segments else 0

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)

    def supersede(self, bases: Collection[int]) -> None:
        self.segments = [
            msgspec.structs.replace(one, superseded=True) if one.base in bases else one
            for one in self.segments
        ]

    def pack(self) -> bytes:
        return pack_document(self)

    @classmethod
    def parse(cls, data: bytes, name: str = MANIFEST) -> "TierManifest":
        manifest = parse_document(data, cls, name)
        if manifest.format != FORMAT:
            raise Damaged(
                f"{name} has format {manifest.format}: a newer release wrote it, run that one"
            )
        manifest.check_names(name)
        return manifest

    def check_names(self, where: str) -> None:
        """Raise Damaged if a name would lead out of its directory."""
        if not is_topic_name(self.name) or not is_incarnation(self.incarnation):
            raise Damaged(f"{where} has an invalid name of a topic: {self.name!r}")
        for segment in self.segments:
            if "/" in segment.stem or not is_relative_path(segment.stem):
                raise Damaged(f"{where} has an invalid name of a segment: {segment.stem!r}")


def prefix_of(incarnation: str) -> str:
    return f"topics/{incarnation}/"


def manifest_name(incarnation: str) -> str:
    return prefix_of(incarnation) + MANIFEST


def object_name(incarnation: str, stem: str, kind: str) -> str:
    return prefix_of(incarnation) + stem + _ENDINGS[kind]


class StoredObject(msgspec.Struct, frozen=True):
    """One file of a segment, with what a reader of it needs."""

    name: str
    file: TieredFile
    block_bytes: int

    @classmethod
    def of(cls, incarnation: str, segment: StoredSegment, kind: str) -> "StoredObject":
        name = object_name(incarnation, segment.stem, kind)
        return cls(name, segment.files[kind], segment.block_bytes)

    @property
    def count(self) -> int:
        return -(-self.file.size // self.block_bytes)

    def read_block(self, store: ObjectStore, number: int) -> bytes:
        """Read and check a block. Retry once if it is wrong: the transfer may be at fault."""
        start = number * self.block_bytes
        length = min(self.block_bytes, self.file.size - start)
        for _ in range(2):
            data = store.read_range(self.name, start, length)
            if len(data) == length and crc32c(data) == self.file.checksum(number):
                return data
        raise Damaged(
            f"{store.address}/{self.name}: bytes {start} to {start + length} do not match their "
            "checksum"
        )

    def blocks(self, store: ObjectStore) -> Iterator[bytes]:
        return (self.read_block(store, number) for number in range(self.count))


def block_checksums(parts: Iterator[bytes]) -> TieredFile:
    """Return the checksums of a file given in parts of BLOCK_BYTES."""
    size, sums = 0, []
    for part in parts:
        size += len(part)
        sums.append(crc32c(part))
    return TieredFile(size, np.array(sums, "<u4").tobytes())


def supersede(fs: Fs, directory: Path, bases: Collection[int]) -> None:
    """Mark segments in `tier.json` as replaced by compaction. Idempotent."""
    if not fs.exists(directory / TIER):
        return
    manifest = TierManifest.parse(fs.read(directory / TIER), TIER)
    manifest.supersede(bases)
    fs.replace(directory / TIER, manifest.pack())
