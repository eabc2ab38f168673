"""recover: push the buffer files of one or many brokers, if they are too many for the replay.

The files (failover_*.buf, qos0_*.buf, also `failed/` and a dead broker's .tmp) are
newline-delimited JSON events whose names sort by time. Files of Queen MQ are read too, in any of
their formats (penstock.protocol.buffer_frames). Spark reads them once, distributes the partitions
to tasks and pushes each partition's events in order through a broker. The broker stores the first
event of each transaction id, so a recovery keeps no state and may be killed and run again. It does
not remove the files: remove them when the report says that nothing was rejected.

Spark distributes and sorts pieces: the lines of one partition in one block of one file. Its cost is
per piece, not per event. The broker receives a line with a checksum as it is in the file, so the
producer, an encrypted payload and the checksum are unchanged. Other events are converted to our
format. Each task pushes on several connections, but each partition on one of them, so that
PostgreSQL works while the task prepares the next request.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa

from penstock.errors import InvalidRequest, NotFound, Unavailable
from penstock.net.tls import ca_text
from penstock.pipeline.session import activate
from penstock.pipeline.sinks.queue import BUFFER_LINES, PUSH_BYTES, PushLink
from penstock.pipeline.source_columns import ddl
from penstock.protocol.buffer_frames import is_framed, read_frames
from penstock.protocol.buffer_lines import Event, decode, encode, has_checksum

PIECES = pa.schema(
    {
        "queue": pa.string(),
        "partition": pa.string(),
        "file": pa.int64(),
        "number": pa.int64(),  # grows from piece to piece of a file
        "events": pa.int64(),
        "lines": pa.binary(),
        # Lines of the block that are not events, in a piece without a partition.
        "unreadable": pa.int64(),
    }
)
IDENTITIES = pa.schema(dict.fromkeys(("queue", "partition", "transactionId"), pa.string()))
NONE = {"queued": 0, "duplicate": 0, "buffered": 0, "unreadable": 0}
COUNTS = pa.schema({**dict.fromkeys(NONE, pa.int64()), "error": pa.string()})
BLOCK_BYTES = 8 << 20  # part of a file that is parsed at once
PIECE_EVENTS = 2000
PUSH_EVENTS = 4000
LANES_PER_TASK = 2  # connections per task
Line = tuple[bytes, Event | None]
NAME = re.compile(r"(?:failover|qos0)(?:_(.+?))?\.buf(?:\.tmp)?")


@dataclass
class Recovered:
    """The counts of pushed events; of a dry run, those that would be pushed."""

    files: int = 0
    events: int = 0
    inserted: int = 0
    duplicate: int = 0
    buffered: int = 0
    unreadable: int = 0  # lines that are not events, including a torn last line
    rejected: list[str] = field(default_factory=list)


def find_files(directories: list[str]) -> list[Path]:
    """Return the buffer files below the directories, ordered by time."""
    files: list[Path] = []
    for directory in map(Path, directories):
        if not directory.is_dir():
            raise NotFound(f"{directory} is not a directory")
        files += (path for path in directory.rglob("*.buf*") if NAME.fullmatch(path.name))
    return sorted(files, key=lambda path: (_replay_rank(path), path.name.partition("_")[2], path))


def _replay_rank(path: Path) -> int:
    """Return the sort rank of a file: some names of Queen MQ do not sort by time."""
    match = NAME.fullmatch(path.name)
    name = match and match[1]
    if name is None:
        return 2
    if name == "processing":
        return 1
    with path.open("rb") as file:
        failed = path.parent.name == "failed" and is_framed(file.read(8))
    return 0 if failed else 3


def recover(
    spark: Any,
    directories: list[str],
    url: str,
    *,
    tasks: int = 8,
    token: str | None = None,
    patience: float = 300.0,
    dry_run: bool = False,
) -> Recovered:
    """Push every buffered event once, in order per partition."""
    files = find_files(directories)
    report = Recovered(files=len(files))
    if not files:
        return report
    spark = activate(spark)
    # ordered by time across directories
    numbered = [(str(path), i) for i, path in enumerate(files)]
    paths = spark.createDataFrame(numbered, "path STRING, file BIGINT")
    paths = paths.repartition(min(len(files), 4 * tasks))
    if dry_run:
        report.unreadable, report.events, distinct = (
            paths.mapInArrow(_identities, ddl(IDENTITIES))
            .selectExpr(
                "count_if(transactionId IS NULL)",
                "count(transactionId)",
                "count(DISTINCT queue, partition, transactionId)",
            )
            .first()
        )
        report.duplicate = report.events - distinct
        return report
    pieces = paths.mapInArrow(_pieces, ddl(PIECES)).repartition(tasks, "queue", "partition")
    dealt = pieces.sortWithinPartitions("queue", "partition", "file", "number")
    counts = dealt.mapInArrow(_pusher(url, token, patience), ddl(COUNTS)).collect()
    report.inserted, report.duplicate, report.buffered, report.unreadable = (
        sum(row[name] for row in counts) for name in NONE
    )
    report.rejected = [row.error for row in counts if row.error]
    report.events = report.inserted + report.duplicate + report.buffered + len(report.rejected)
    return report


def _blocks(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, list[Line]]]:
    """Yield a file's number and some of its lines with their events (None: not an event)."""
    for batch in batches:
        for path, file in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            with Path(path).open("rb") as opened:
                start = opened.read(8)
                opened.seek(0)
                blocks = _framed_lines if is_framed(start) else _lines
                for block in blocks(opened, path):
                    yield file, block


def _lines(file: BinaryIO, path: str) -> Iterator[list[Line]]:
    offset = 0
    while some := file.readlines(BLOCK_BYTES):
        block: list[Line] = []
        for line in some:
            begin, offset = offset, offset + len(line)
            if line != b"\n":
                event = _event(line, f"{path}:{begin}")
                if event and not has_checksum(line.rstrip(b"\n")):
                    line = _line(event)
                block.append((line, event))
        yield block


def _framed_lines(file: BinaryIO, path: str) -> Iterator[list[Line]]:
    pieces = iter(lambda: file.read(BLOCK_BYTES), b"")
    for window in read_frames(pieces, path):
        unreadable = [*window.bad, *([window.torn] if window.torn else [])]
        yield [(_line(event), event) for event in window.events] + [(b, None) for b in unreadable]


def _event(line: bytes, place: str) -> Event | None:
    try:
        return decode(line, place)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _line(event: Event) -> bytes:
    payload = bytes(event.payload)
    if b"\n" in payload:
        event.payload = msgspec.Raw(msgspec.json.format(payload, indent=-1))
    return encode(event)


def _pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    number = 0
    for file, lines in _blocks(batches):
        partitions: defaultdict[tuple[str, str], list[bytes]] = defaultdict(list)
        for line, event in lines:
            if event is not None:
                whole = line if line.endswith(b"\n") else line + b"\n"
                partitions[event.queue, event.partition].append(whole)
        unreadable = sum(event is None for _, event in lines)
        rows: list[tuple[Any, ...]] = [("", "", file, number, 0, b"", unreadable)]
        for (queue, partition), whole_lines in partitions.items():
            for begin in range(0, len(whole_lines), PIECE_EVENTS):
                number += 1
                some = whole_lines[begin : begin + PIECE_EVENTS]
                rows.append((queue, partition, file, number, len(some), b"".join(some), 0))
        yield _batch(rows, PIECES)


def _identities(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the identity of each event, for a dry run; nulls for a line that is not an event."""
    for _, lines in _blocks(batches):
        rows = [
            (e.queue, e.partition, e.transaction_id) if e else (None, None, None) for _, e in lines
        ]
        yield _batch(rows, IDENTITIES)


def _batch(rows: list[Any], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [[] for _ in schema]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class _Lane:
    """A connection and the thread that pushes on it. After a failed request it sends no other:
    later events would be stored before those that the repeated task pushes."""

    def __init__(self, link: PushLink) -> None:
        self._link = link
        self._failed = False
        self._thread = ThreadPoolExecutor(1)
        self._pushes: deque[Future[list[dict[str, Any]]]] = deque()
        self._pieces: list[bytes] = []
        self._events = self._bytes = 0

    def add(self, piece: bytes, events: int) -> Iterator[dict[str, Any]]:
        """Push a piece together with others of this lane. Yield the results of earlier requests."""
        over = self._events + events > PUSH_EVENTS or self._bytes + len(piece) > PUSH_BYTES
        if self._events and over:
            yield from self.push()
        self._pieces.append(piece)
        self._events += events
        self._bytes += len(piece)

    def push(self) -> Iterator[dict[str, Any]]:
        while len(self._pushes) > 1:  # one being pushed, one ready
            yield from self._pushes.popleft().result()
        if self._events:
            self._pushes.append(self._thread.submit(self._pushed, b"".join(self._pieces)))
            self._pieces, self._events, self._bytes = [], 0, 0

    def _pushed(self, joined: bytes) -> list[dict[str, Any]]:
        if self._failed:
            raise Unavailable("a push before this one failed")
        self._failed = True
        done = _pushed(self._link, [line + b"\n" for line in joined.split(b"\n")[:-1]])
        self._failed = False
        return done

    def finish(self) -> Iterator[dict[str, Any]]:
        yield from self.push()
        while self._pushes:
            yield from self._pushes.popleft().result()

    @property
    def waiting(self) -> int:
        return sum(not push.done() for push in self._pushes)

    def close(self) -> None:
        """Wait for running requests, so that a repeated task has its partitions to itself."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._link.close()


def _pusher(url: str, token: str | None, patience: float) -> Any:
    ca = ca_text(None)

    def push(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        lanes = [
            _Lane(PushLink(url, token, patience, ca, BUFFER_LINES)) for _ in range(LANES_PER_TASK)
        ]
        lane, place = lanes[0], None
        try:
            for batch in batches:
                outcomes: list[dict[str, Any]] = []
                columns = [batch.column(i).to_pylist() for i in (0, 1, 4, 5, 6)]
                for queue, partition, events, lines, unreadable in zip(*columns, strict=True):
                    if unreadable:
                        outcomes.append({"unreadable": unreadable})
                    if not events:
                        continue
                    # consecutive pieces of a partition stay on one lane
                    if place != (queue, partition):
                        place = (queue, partition)
                        lane = min(lanes, key=lambda lane: lane.waiting)
                    outcomes += lane.add(lines, events)
                yield _counts(outcomes)
            yield _counts([row for lane in lanes for row in lane.finish()])
        finally:
            for lane in lanes:
                lane.close()

    return push


def _pushed(link: PushLink, lines: list[bytes]) -> list[dict[str, Any]]:
    """Push lines. If the broker refuses the content of the batch, push them one by one."""
    try:
        return [asdict(link.push(lines, repeatable=True))]
    except InvalidRequest as refused:
        if len(lines) == 1:
            return [{"error": f"{refused}: {lines[0][:500]!r}"}]
        return [row for line in lines for row in _pushed(link, [line])]


def _counts(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([NONE | row for row in rows], schema=COUNTS)
