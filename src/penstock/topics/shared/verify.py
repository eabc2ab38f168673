"""Check shared logs: every batch in the database, and every range of an object that a row names.

Nothing is written, and brokers may append and move meanwhile. A row whose batches cannot be read is
read again: the mover may have replaced it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable

from penstock.errors import Damaged, NotFound
from penstock.log.verify import Finding
from penstock.protocol.kafka_batch import batches_in
from penstock.protocol.names import partition_label
from penstock.topics.shared.chunks import Row, read_row
from penstock.topics.shared.log import READ
from penstock.topics.tier.verify import TierReport

PIECE_BYTES = 1 << 20  # of one statement, of which the last batch may be beyond it

Query = Callable[..., Awaitable[list[Row]]]  # runs a statement with arguments
Fetch = Callable[[str, int, int], Awaitable[bytes]]  # a range of an object


def report_of(log: Row) -> TierReport:
    """Return an empty report about a partition. Its `segments` are rows."""
    return TierReport(
        topic=partition_label(log["topic"], log["partition"]),
        incarnation=log["incarnation"],
        first_offset=log["first_offset"],
        next_offset=log["next_offset"],
    )


async def check(log_id: int, report: TierReport, query: Query, fetch: Fetch) -> AsyncIterator[int]:
    """Check a log from the report's first offset on. Yield the bytes of each row."""
    at = report.first_offset
    while rows := await query(READ, log_id, at, PIECE_BYTES):  # without one, it was deleted
        at = max(at, rows[0]["first_offset"])  # retention
        report.next_offset = rows[0]["next_offset"]
        if rows[0]["base_offset"] is None:
            if at < report.next_offset:
                what = f"offsets {at} to {report.next_offset - 1} are missing"
                report.findings.append(Finding("PostgreSQL", at, what))
            return
        for row in rows:
            problem = await _problem(row, fetch)
            if problem is not None:
                if not await _is_unchanged(log_id, row, query):
                    break
                where = row["object"] or "PostgreSQL"
                report.findings.append(Finding(where, row["position"] or 0, problem))
            report.missing += max(0, row["base_offset"] - at)
            report.segments += 1
            report.records += row["records"]
            report.bytes += row["size"]
            yield row["size"]
            at = row["last_offset"] + 1


async def _problem(row: Row, fetch: Fetch) -> str | None:
    """Return what is wrong with the batches of a row, or None."""
    base, end = row["base_offset"], row["last_offset"] + 1
    try:
        data = await read_row(row, fetch)
    except (Damaged, NotFound) as error:
        return str(error)
    heads = [head for _, head in batches_in(data)]
    records = sum(head.records for head in heads)
    whole = len(data) == row["size"] and records == row["records"]
    if whole and (row["object"] is not None or heads[-1].next_offset == end):
        return None
    return (
        f"{records} records in {len(data)} bytes are there instead of {row['records']} in "
        f"{row['size']} of the offsets {base} to {end - 1}"
    )


async def _is_unchanged(log_id: int, row: Row, query: Query) -> bool:
    """Return whether the row is still as it was."""
    [again, *_] = await query(READ, log_id, row["last_offset"], 1) or [None]
    kept = ("last_offset", "object", "position")
    return again is not None and all(again[name] == row[name] for name in kept)
