"""recover: buffer files of one or many brokers into PostgreSQL, when there are too many for the brokers' own replay.

The files (failover_*.buf, qos0_*.buf, also `failed/` and a dead broker's .tmp) are newline-delimited JSON events whose
names sort by time. Spark reads them once, deals the partitions out to tasks and pushes each partition's events in order
through a broker. The broker stores an event once per transaction id, the first of several, so nothing is looked up or
remembered here, and a recovery may be killed and run again. Files are left where they are: remove them when the report
says that nothing was rejected.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from penstock.errors import InvalidRequest, NotFound
from penstock.net.tls import ca_text
from penstock.pipeline.queue_sink import PUSH_ROWS, PushLink

SCHEMA = "queue STRING, partition STRING, transactionId STRING, file STRING, position BIGINT, item BINARY, error STRING"
EVENTS = pa.schema(
    [
        ("queue", pa.string()),
        ("partition", pa.string()),
        ("transactionId", pa.string()),
        ("file", pa.string()),
        ("position", pa.int64()),
        ("item", pa.binary()),  # as it is pushed; empty when the line is no event
        ("error", pa.string()),
    ]
)
COUNTS = pa.schema(
    [
        ("queued", pa.int64()),
        ("duplicate", pa.int64()),
        ("buffered", pa.int64()),
        ("unreadable", pa.int64()),
        ("error", pa.string()),
    ]
)
PATTERNS = ("failover_*.buf", "qos0_*.buf", "failover_*.buf.tmp", "qos0_*.buf.tmp")


class _Event(msgspec.Struct, kw_only=True):
    queue: str
    transaction_id: str
    partition: str = "Default"
    payload: msgspec.Raw = msgspec.Raw(b"null")
    trace_id: str | None = None


class _Item(msgspec.Struct, omit_defaults=True):
    queue: str
    partition: str
    transactionId: str  # noqa: N815
    payload: msgspec.Raw
    traceId: str | None = None  # noqa: N815


@dataclass
class Recovered:
    files: int = 0
    events: int = 0
    inserted: int = 0
    duplicate: int = 0
    buffered: int = 0
    unreadable: int = 0  # lines that are no event, a torn last line included
    rejected: list[str] = field(default_factory=list)


def find_files(directories: list[str]) -> list[Path]:
    found: list[Path] = []
    for directory in map(Path, directories):
        if not directory.is_dir():
            raise NotFound(f"{directory} is no directory")
        for pattern in PATTERNS:
            found += directory.rglob(pattern)
    return sorted(found, key=lambda path: (path.name.partition("_")[2], path))


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
    numbered = {str(path): f"{i:09d}" for i, path in enumerate(files)}  # the order of time, whatever the directory
    paths = spark.createDataFrame(list(numbered.items()), "path STRING, file STRING")
    events = paths.repartition(min(len(files), 4 * tasks)).mapInArrow(_read, SCHEMA)
    if dry_run:
        counted = events.selectExpr(
            "count(error) AS unreadable",
            "count_if(error IS NULL) AS good",
            "count(DISTINCT queue, partition, transactionId) AS known",
        ).first()
        report.unreadable, report.events = counted.unreadable, counted.good
        report.duplicate = counted.good - counted.known
        return report
    dealt = events.repartition(tasks, "queue", "partition").sortWithinPartitions(
        "queue", "partition", "file", "position"
    )
    counts = dealt.select("item").mapInArrow(_pusher(url, token, patience), _ddl(COUNTS)).collect()
    report.inserted = sum(row.queued for row in counts)
    report.duplicate = sum(row.duplicate for row in counts)
    report.buffered = sum(row.buffered for row in counts)
    report.unreadable = sum(row.unreadable for row in counts)
    report.rejected = [row.error for row in counts if row.error]
    report.events = report.inserted + report.duplicate + report.buffered + len(report.rejected)
    return report


def _read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Files to events, each with its item as it will be pushed."""
    decode = msgspec.json.Decoder(_Event).decode
    encode = msgspec.json.Encoder().encode
    for batch in batches:
        for path, number in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
            rows: list[tuple[str | None, str | None, str | None, str, int, bytes, str | None]] = []
            for position, line in enumerate(Path(path).read_bytes().split(b"\n")):
                if not line:
                    continue
                try:
                    event = decode(line)
                except msgspec.DecodeError as error:
                    rows.append((None, None, None, number, position, b"", str(error)))
                    continue
                item = _Item(event.queue, event.partition, event.transaction_id, event.payload, event.trace_id or None)
                rows.append((event.queue, event.partition, event.transaction_id, number, position, encode(item), None))
            columns: list[Any] = list(zip(*rows, strict=True)) if rows else [[] for _ in EVENTS]
            yield pa.RecordBatch.from_arrays(
                [pa.array(column, field.type) for column, field in zip(columns, EVENTS, strict=True)], schema=EVENTS
            )


def _pusher(url: str, token: str | None, patience: float) -> Any:
    ca = ca_text(None)

    def push(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        link = PushLink(url, token, patience, ca)
        try:
            for batch in batches:
                lines = batch.column(0).to_pylist()
                items = [item for item in lines if item]
                for begin in range(0, len(items), PUSH_ROWS):
                    yield _counts(_pushed(link, items[begin : begin + PUSH_ROWS]))
                yield _counts([{"unreadable": len(lines) - len(items)}])
        finally:
            link.close()

    return push


def _pushed(link: PushLink, items: list[bytes]) -> list[dict[str, Any]]:
    """Push them; when the broker refuses the batch for its content, push them one by one so that one fails alone."""
    try:
        done = link.push(items, repeatable=True)
        return [{"queued": done.queued, "duplicate": done.duplicate, "buffered": done.buffered}]
    except InvalidRequest as refused:
        if len(items) == 1:
            return [{"error": f"{refused}: {items[0][:500]!r}"}]
        return [row for item in items for row in _pushed(link, [item])]


def _counts(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    none = {"queued": 0, "duplicate": 0, "buffered": 0, "unreadable": 0, "error": None}
    return pa.RecordBatch.from_pylist([none | row for row in rows], schema=COUNTS)


def _ddl(schema: pa.Schema) -> str:
    kinds = {pa.int64(): "BIGINT", pa.string(): "STRING"}
    return ", ".join(f"{field.name} {kinds[field.type]}" for field in schema)
