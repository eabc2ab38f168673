"""The files of a topic, byte by byte. All integers on disk are little-endian.

A topic is a directory `<data_directory>/<topic>/`. The first three files have exactly aiq's format.
So aiq can read a topic of ours with a single segment, and we can read aiq's topics.

    data.log            the active segment: records, one after another
                          0  offset u64 | 8  length u32 | 12  payload
    index.idx           one row per record of data.log
                          0  offset u64 | 8  byte position of the record in data.log u64
    metadata.meta         0  next offset u64
    batches.crc         our sidecar, one row of 72 bytes per appended batch of data.log
                          0  first offset u64        40 producer id, 16 bytes (zero: none)
                          8  records u32             56 sequence u64
                         12  flags u32               64 CRC32C of data.log[start:end] u32
                         16  start position u64      68 CRC32C of this row's first 68 bytes u32
                         24  end position u64
                         32  append time, microseconds since 1970 u64
                        flags: 1 = has a producer, 2 = compacted (records were removed from between)
    data-<base>.log, index-<base>.idx, batches-<base>.crc
                        a sealed segment; <base> is its first offset, 20 decimal digits
    checkpoint          how far the active segment was whole and durable, and the producers at that
                        time
                          0  magic "PENSTCK1"        56 size of batches.crc u64
                          8  incarnation, 16 bytes   64 time of the last record, microseconds u64
                         24  next offset u64         72 producers u32
                         32  base of data.log u64    76 state u32
                         40  size of data.log u64    80 producers, see below
                         48  size of index.idx u64   then CRC32C of all before u32
                        a producer: id 16 bytes, time u64, entries u32, then per entry sequence u64,
                        first offset u64, records u32; with 0 records the batch is not in the log,
                        but the next one is expected
                        state: 0 = being written, each commit is synced row first; 1 = stopped
                        cleanly, no commit follows; 2 = being written, rows and data synced later
    incarnation         text: 32 hexadecimal digits, a space, 8 digits of their CRC32C, a newline
    archived            text: an offset, a space, 8 digits of its CRC32C, a newline (if it exists,
                        retention waits for it)
    policy              text: `compact` or `delete`, a space, 8 digits of its CRC32C, a newline
                        (default: `delete`)
    limits              text: a JSON object (`penstock.log.limits`), a space, 8 digits of its
                        CRC32C, a newline: the topic's own retention, largest record, and first
                        offset
    tier.json           the segments in an object store, see `penstock.log.tier`
    damage.json         damage that could not be repaired, see `penstock.log.damage`
    quarantine-<base>-<position>.bin
                        bytes that recovery cut off the end of a segment
    *.new, *.swap, swap-<base>
                        unfinished work: when the topic is opened, swap-<base> is finished, and the
                        others are removed
"""

import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from crc32c import crc32c

from penstock.protocol.names import is_topic_name, partition_label, split_label
from penstock.protocol.record_batch import HEADER_SIZE as HEADER_SIZE
from penstock.protocol.record_batch import RECORD_HEADER as RECORD_HEADER

DATA, INDEX, BATCHES, METADATA = "data.log", "index.idx", "batches.crc", "metadata.meta"
CHECKPOINT, INCARNATION, ARCHIVED, DAMAGE = "checkpoint", "incarnation", "archived", "damage.json"
POLICY, LIMITS, TIER = "policy", "limits", "tier.json"
DELETE, COMPACT = "delete", "compact"  # policies
KINDS = (BATCHES, INDEX, DATA)  # the order in which a roll renames them: the data last
SWAP_PREFIX = "swap-"
PRIVATE = ".penstock"  # directory of all files that aiq does not have
LOGS = "logs"  # directory of record batches, by topic and partition
_SEALED_NAME = re.compile(r"(data|index|batches)-(\d{20})\.(log|idx|crc)")

INDEX_SIZE = 16
BATCH_SIZE = 72
HEADER_TYPE = np.dtype([("offset", "<u8"), ("length", "<u4")])
INDEX_TYPE = np.dtype([("offset", "<u8"), ("position", "<u8")])
BATCH_TYPE = np.dtype(
    [
        ("first", "<u8"),
        ("count", "<u4"),
        ("flags", "<u4"),
        ("start", "<u8"),
        ("end", "<u8"),
        ("time", "<u8"),
        ("producer", "V16"),
        ("sequence", "<u8"),
        ("crc", "<u4"),
        ("check", "<u4"),
    ]
)
HAS_PRODUCER, COMPACTED = 1, 2
STRICT, CLEAN, RELAXED = 0, 1, 2  # states of a checkpoint

INDEX_ROW = struct.Struct("<QQ")
_BATCH_ROW = struct.Struct("<QIIQQQ16sQI")
_CHECK = struct.Struct("<I")
_METADATA = struct.Struct("<Q")
_CHECKPOINT = struct.Struct("<8s16sQQQQQQII")
_PRODUCER = struct.Struct("<16sQI")
_ENTRY = struct.Struct("<QQI")
_MAGIC = b"PENSTCK1"
NO_PRODUCER = bytes(16)


def label_of(directory: Path) -> str:
    """Return the label of the partition whose log is in this directory."""
    if has_batches(directory):
        return partition_label(directory.parent.name, int(directory.name))
    return directory.name


def has_batches(directory: Path) -> bool:
    """Return whether a log in this directory has record batches. They are in `.penstock/logs`."""
    return directory.parent.parent.name == LOGS and directory.name.isdigit()


def log_path(data: Path, label: str) -> Path:
    """Return the directory of this partition's log; if there is none, the one in aiq's layout."""
    topic, partition = split_label(label)
    batches = data / PRIVATE / LOGS / topic / str(partition)
    return data / topic if partition == 0 and not batches.exists() else batches


def find_logs(data: Path) -> dict[str, Path]:
    """Return the logs of a data directory, by label."""
    plain = {path.name: path for path in data.iterdir() if is_topic_name(path.name)}
    batches = {label_of(path): path for path in data.glob(f"{PRIVATE}/{LOGS}/*/*")}
    directories = {**batches, **{name: path for name, path in plain.items() if path.is_dir()}}
    return dict(sorted(directories.items()))


def sealed_name(kind: str, base: int) -> str:
    stem, extension = kind.split(".")
    return f"{stem}-{base:020d}.{extension}"


def parse_sealed(name: str) -> tuple[str, int] | None:
    """Return the kind and base of a sealed segment's file; None for any other name."""
    match = _SEALED_NAME.fullmatch(name)
    if match is None:
        return None
    kind = f"{match[1]}.{match[3]}"
    return (kind, int(match[2])) if kind in KINDS else None


class BatchRow(NamedTuple):
    """A row of the sidecar, without its own checksum."""

    first: int
    records: int
    flags: int
    start: int
    end: int
    time: int
    producer: bytes
    sequence: int
    crc: int

    def pack(self) -> bytes:
        return pack_batch_row(*self)


def pack_batch_row(*fields: int | bytes) -> bytes:
    """Encode the fields of a `BatchRow` and the row's own checksum."""
    row = _BATCH_ROW.pack(*fields)
    return row + _CHECK.pack(crc32c(row))


def parse_batches(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the complete rows in `data`, and for each whether it matches its own checksum."""
    count = len(data) // BATCH_SIZE
    rows = np.frombuffer(data, BATCH_TYPE, count)
    view = memoryview(data)
    sums = np.fromiter(
        (crc32c(view[at : at + BATCH_SIZE - 4]) for at in range(0, count * BATCH_SIZE, BATCH_SIZE)),
        np.uint32,
        count,
    )
    return rows, sums == rows["check"]


def pack_metadata(next_offset: int) -> bytes:
    return _METADATA.pack(next_offset)


def parse_metadata(data: bytes) -> int | None:
    return int(_METADATA.unpack(data)[0]) if len(data) == _METADATA.size else None


def pack_checked(text: str) -> bytes:
    return f"{text} {crc32c(text.encode()):08x}\n".encode()


def parse_checked(data: bytes) -> str | None:
    """Return the text of a file with a checksum (`incarnation`, ...); None if it is damaged."""
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError:
        return None
    body = text[:-10]
    return body if body and pack_checked(body) == data else None


@dataclass(slots=True)
class ProducerEntry:
    """The recent appends of one producer."""

    time: int  # microseconds, of the last entry
    # sequence -> first offset, records; in order
    batches: dict[int, tuple[int, int]] = field(default_factory=dict)
    last: int = -1  # the last accepted sequence; the next one must follow it
    id: bytes = b""  # its id on disk, if that differs from its key


@dataclass(slots=True)
class Checkpoint:
    incarnation: bytes
    next_offset: int = 0
    base: int = 0
    data_size: int = 0
    index_size: int = 0
    batches_size: int = 0
    last_time: int = 0
    state: int = STRICT
    producers: dict[bytes, ProducerEntry] = field(default_factory=dict)  # by id

    def pack(self) -> bytes:
        parts = [
            _CHECKPOINT.pack(
                _MAGIC,
                self.incarnation,
                self.next_offset,
                self.base,
                self.data_size,
                self.index_size,
                self.batches_size,
                self.last_time,
                len(self.producers),
                self.state,
            )
        ]
        for key, producer in self.producers.items():
            batches = producer.batches or ({producer.last: (0, 0)} if producer.last >= 0 else {})
            parts.append(_PRODUCER.pack(producer.id or key, producer.time, len(batches)))
            parts.extend(_ENTRY.pack(sequence, *at) for sequence, at in batches.items())
        body = b"".join(parts)
        return body + _CHECK.pack(crc32c(body))

    @classmethod
    def parse(cls, data: bytes) -> "Checkpoint | None":
        """Decode the file. Return None if it is damaged: the topic is then scanned."""
        if len(data) < _CHECKPOINT.size + 4 or crc32c(data[:-4]) != _CHECK.unpack(data[-4:])[0]:
            return None
        magic, *numbers, count, state = _CHECKPOINT.unpack_from(data)
        if magic != _MAGIC:
            return None
        checkpoint = cls(*numbers)
        checkpoint.state = state
        at = _CHECKPOINT.size
        for _ in range(count):
            key, time, entries = _PRODUCER.unpack_from(data, at)
            at += _PRODUCER.size
            producer = checkpoint.producers[key] = ProducerEntry(time, id=key)
            for _ in range(entries):
                sequence, first, records = _ENTRY.unpack_from(data, at)
                at += _ENTRY.size
                producer.last = sequence
                if records:
                    producer.batches[sequence] = (first, records)
        return checkpoint
