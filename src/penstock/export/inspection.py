"""Read a route's directory from outside: its send queue and its dead letters.

This needs no running broker and takes no lock, so it shows a live queue as of one moment. The
broker that runs the queue passes the `end` of the written stream. Without it, the last block may
look incomplete.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import UNSET

from penstock.contract.routes import ChunkReport, DamagedBytes, RouteInspection
from penstock.errors import Conflict
from penstock.export.deadletters import NAME as DEAD_LETTERS
from penstock.export.deadletters import read_letters
from penstock.export.payload import decompress, split
from penstock.export.sendqueue import (
    JOURNAL,
    META,
    STREAM_END,
    Books,
    ChunkReader,
    Journal,
    chunk_files,
)
from penstock.io.fs import DISK, Fs

MAX_ATTEMPTS = 5  # if the queue changes while it is read


def examine(directory: Path, fs: Fs = DISK, end: int = STREAM_END) -> RouteInspection:
    """Read and check all chunks, the journal, the books and the dead letters."""
    for _ in range(MAX_ATTEMPTS):
        try:
            return _examine(directory, fs, end)
        except FileNotFoundError:
            continue  # all blocks in that chunk were completed in the meantime
    raise Conflict("the queue changes faster than it can be read; pause the route, or try again")


def _examine(directory: Path, fs: Fs, end: int) -> RouteInspection:
    problems: list[str] = []
    entries = Journal(fs, directory).load()
    books = Books()
    damaged_entries = books.replay(entries)
    if damaged_entries:
        problems.append(f"{JOURNAL}: {damaged_entries} damaged entries")
    chunks, records, reader = [], 0, ChunkReader(fs)
    for chunk in chunk_files(fs, directory, end):
        bad: list[tuple[int, int]] = []
        report = ChunkReport(chunk.path.name, chunk.size, 0, 0, [])
        for block in reader.walk(chunk, chunk.start, bad, with_body=False):
            report.first = block.sequence if report.first is UNSET else report.first
            report.last = block.sequence
            report.blocks += 1
            books.advance(block.sequence + 1, block.through)
            if block.sequence not in books.completed:
                report.waiting += 1
                records += block.records
        report.damaged = [DamagedBytes(start - chunk.start, stop - start) for start, stop in bad]
        problems += [
            f"{report.name}: {part.bytes} damaged bytes at {part.at}" for part in report.damaged
        ]
        chunks.append(report)
    reader.close()
    letters = list(read_letters(_read(fs, directory / DEAD_LETTERS)))
    if None in letters:
        problems.append(f"{DEAD_LETTERS}: {letters.count(None)} damaged lines")
    missing = books.queued - records
    if missing:
        problems.append(f"{missing} records are queued according to {JOURNAL} but not on disk")
    return RouteInspection(
        chunks=chunks,
        waiting_batches=sum(chunk.waiting for chunk in chunks),
        waiting_records=records,
        journal_entries=len(entries),
        accounting=books.accounting(),
        position=books.position,
        dead_letters=len(letters),
        meta=_meta(fs, directory, problems),
        problems=problems,
    )


def waiting_records(
    directory: Path, fs: Fs = DISK, end: int = STREAM_END
) -> Iterator[tuple[int, int, bytes]]:
    """Yield (sequence, index, record) of the records that wait for delivery, oldest first."""
    books = Books()
    books.replay(Journal(fs, directory).load())
    with closing(ChunkReader(fs)) as reader:
        for chunk in chunk_files(fs, directory, end):
            for block in reader.walk(chunk, chunk.start, []):
                if block.sequence not in books.completed:
                    body = decompress(block.body, block.compression)
                    for index, record in enumerate(split(body, block.encoding)):
                        yield block.sequence, index, record


def first_records(
    records: Iterable[tuple[int, int, bytes]], limit: int, size: int
) -> list[tuple[int, int, bytes]]:
    """Return the first `limit` records, or as many as have `size` bytes; at least one."""
    first: list[tuple[int, int, bytes]] = []
    try:
        for one in islice(records, limit):
            first.append(one)
            size -= len(one[2])
            if size <= 0:
                break
    except FileNotFoundError:
        pass  # the queue is live: the next blocks were delivered meanwhile
    return first


def dead_letters(directory: Path, fs: Fs = DISK) -> Iterator[bytes]:
    """Yield the dead letters as JSON, without their checksums."""
    for line in _read(fs, directory / DEAD_LETTERS).splitlines():
        yield line.partition(b" ")[2]


def _read(fs: Fs, path: Path) -> bytes:
    return fs.read(path) if fs.exists(path) else b""


def _meta(fs: Fs, directory: Path, problems: list[str]) -> Any:
    data = _read(fs, directory / META)
    try:
        return json.loads(data) if data else None
    except ValueError:
        problems.append(f"{META}: not JSON")
        return None
