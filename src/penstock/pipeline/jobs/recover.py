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
format.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa

from penstock.errors import InvalidRequest, NotFound
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


def _pusher(url: str, token: str | None, patience: float) -> Any:
    ca = ca_text(None)

    def push(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with closing(PushLink(url, token, patience, ca, BUFFER_LINES)) as link:
            waiting: list[bytes] = []  # pieces
            events = size = 0
            for batch in batches:
                outcomes: list[dict[str, Any]] = []
                columns = [batch.column(name).to_pylist() for name in ("events", "lines")]
                for count, lines in zip(*columns, strict=True):
                    if waiting and (events + count > PUSH_EVENTS or size + len(lines) > PUSH_BYTES):
                        outcomes += _pushed(link, _lines_of(waiting))
                        waiting, events, size = [], 0, 0
                    if count:
                        waiting.append(lines)
                        events, size = events + count, size + len(lines)
                unreadable = sum(batch.column("unreadable").to_pylist())
                yield _counts([*outcomes, {"unreadable": unreadable}])
            yield _counts(_pushed(link, _lines_of(waiting)) if waiting else [])

    return push


def _lines_of(pieces: list[bytes]) -> list[bytes]:
    return [line + b"\n" for line in b"".join(pieces).split(b"\n")[:-1]]


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
