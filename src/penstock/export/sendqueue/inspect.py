"""Looking into a send queue's directory from outside, and putting it in order. Nothing here needs a
running broker.

`examine` only reads and takes no lock: on a live queue it shows a moment. The broker that runs the
queue names the `end` of what is written; from outside a block may be seen half written at the very
end. `repair` owns the directory while it runs: it reads every block there is, sets damaged places
aside, books their records as dropped, shortens the journal and leaves metadata that spares the next
start a scan.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import UNSET

from penstock.errors import Conflict
from penstock.export.deadletters import NAME as DEAD_LETTERS
from penstock.export.deadletters import read_letters
from penstock.export.payload import decompress, split
from penstock.export.sendqueue.blocks import Block, Chunk, ChunkReader, is_chunk_name
from penstock.export.sendqueue.fastqueue import FastQueue
from penstock.export.sendqueue.journal import Books, Journal
from penstock.export.sendqueue.store import LOG, META, Options
from penstock.export.status import ChunkReport, DamagedBytes, Inspection, Repaired
from penstock.log.fs import DISK, Fs

MAX_ATTEMPTS = 5  # at a queue that changes while it is read


def examine(directory: Path, fs: Fs = DISK, end: int | None = None) -> Inspection:
    """Chunks read whole and checked, journal, books, dead letters, and what is wrong."""
    for _ in range(MAX_ATTEMPTS):
        try:
            return _examine(directory, fs, end)
        except FileNotFoundError:
            continue  # what was in that chunk is completed meanwhile
    raise Conflict("the queue changes faster than it can be read; pause the route, or try again")


def _examine(directory: Path, fs: Fs, end: int | None) -> Inspection:
    problems: list[str] = []
    entries = Journal(fs, directory / LOG).load()
    books = Books()
    damaged_entries = books.replay(entries)
    if damaged_entries:
        problems.append(f"{LOG}: {damaged_entries} damaged entries")
    chunks, records = [], 0
    for chunk, reader in _chunks(directory, fs, end):
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
        problems.append(f"{missing} records are queued by the books but not on disk")
    return Inspection(
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
    directory: Path, fs: Fs = DISK, end: int | None = None
) -> Iterator[tuple[int, int, bytes]]:
    """(sequence, index, record) of what waits to be delivered, oldest first."""
    books = Books()
    books.replay(Journal(fs, directory / LOG).load())
    for chunk, reader in _chunks(directory, fs, end):
        with closing(reader):
            for block in reader.walk(chunk, chunk.start, []):
                if block.sequence not in books.completed:
                    for index, record in enumerate(_records_of(block)):
                        yield block.sequence, index, record


def first_records(
    records: Iterable[tuple[int, int, bytes]], limit: int, size: int
) -> list[tuple[int, int, bytes]]:
    """The first `limit`, or as many as have `size` bytes together; at least one."""
    first: list[tuple[int, int, bytes]] = []
    try:
        for one in islice(records, limit):
            first.append(one)
            size -= len(one[2])
            if size <= 0:
                break
    except FileNotFoundError:
        pass  # of a live queue: what follows was delivered meanwhile
    return first


def dead_letters(directory: Path, fs: Fs = DISK) -> Iterator[bytes]:
    """The dead letters as JSON, one line each, without their checksums."""
    for line in _read(fs, directory / DEAD_LETTERS).splitlines():
        yield line.partition(b" ")[2]


def _records_of(block: Block) -> list[bytes]:
    return split(decompress(block.body, block.compression), block.encoding)


async def repair(directory: Path, fs: Fs = DISK) -> Repaired:
    """Read everything, book what is damaged, leave the queue clean. The books afterwards."""
    events: Counter[str] = Counter()

    def count(name: str, amount: int) -> None:
        events[name] += amount

    with ThreadPoolExecutor(1) as pool:
        queue = FastQueue(fs, directory, Options(inmemory_blocks=1), pool, on_event=count)
        await queue.open()
        await queue.scrub()
        await queue.close()
    return Repaired(queue.books.accounting(), queue.count, events)


def _chunks(directory: Path, fs: Fs, end: int | None = None) -> Iterator[tuple[Chunk, ChunkReader]]:
    """The chunks, up to the place `end` of the stream."""
    end = 1 << 62 if end is None else end
    names = [name for name in fs.list_dir(directory) if is_chunk_name(name) and int(name, 16) < end]
    starts = [int(name, 16) for name in names] + [end]
    for name, start, following in zip(names, starts, starts[1:], strict=False):
        path = directory / name
        chunk = Chunk(start, path, min(fs.size(path), following - start), 0, 0)
        yield chunk, ChunkReader(fs)


def _read(fs: Fs, path: Path) -> bytes:
    return fs.read(path) if fs.exists(path) else b""


def _meta(fs: Fs, directory: Path, problems: list[str]) -> Any:
    data = _read(fs, directory / META)
    try:
        return json.loads(data) if data else None
    except ValueError:
        problems.append(f"{META}: not JSON")
        return None
