"""dlq-report: count dead letters by error and queue over time, with samples.

Errors are distinguished by their text without what differs from one message to the next: ids,
hexadecimal numbers, times, addresses and numbers become placeholders; of a Python traceback the
last line counts, of any other text the first. Payloads are read for the samples only; those of
encrypted messages stay closed.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as f

from penstock.errors import InvalidRequest
from penstock.pipeline.jobs import (
    MINUTE,
    Say,
    html_report,
    minute_of,
    moment,
    postgres_frames,
    quiet,
)
from penstock.pipeline.jobs.html_report import HtmlReport, ReportTable, short, top
from penstock.pipeline.jobs.svg_chart import ChartSeries, Panel, number
from penstock.pipeline.session import activate
from penstock.pipeline.source_columns import TIMESTAMP
from penstock.pipeline.sources.postgres import Postgres

TASKS = 8
LETTERS_PER_TASK = 50_000
MAX_ERROR_CHARACTERS = 200
MAX_PAYLOAD_BYTES = 500
SECOND = "%Y-%m-%d %H:%M:%S"

LETTERS = pa.schema(
    {
        "id": pa.int64(),
        **dict.fromkeys(("queue", "consumer", "partition", "transaction"), pa.string()),
        "at": TIMESTAMP,
        "attempts": pa.int64(),
        "error": pa.string(),
    }
)
SOURCE = """
    FROM dead_letters d JOIN queues q ON q.id = d.queue_id AND q.deleted_at IS NULL
    JOIN partitions p ON p.id = d.partition_id LEFT JOIN groups g ON g.id = d.group_id
   WHERE d.failed_at < '{until}' {where}"""
READ = (
    "SELECT d.id, q.name, g.name, p.name, d.transaction_id, d.failed_at, d.attempts::bigint, "
    "d.error" + SOURCE
)

# In this order: the longer and more specific patterns first.
PATTERNS = (
    (r"(?i)\\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\\b", "<id>"),
    (
        r"\\b\\d{4}-\\d\\d-\\d\\d([T ]\\d\\d:\\d\\d(:\\d\\d)?([.,]\\d+)?(Z|[+-]\\d\\d:?\\d\\d)?)?",
        "<time>",
    ),
    (r"\\b\\d{1,3}(\\.\\d{1,3}){3}(:\\d+)?\\b", "<address>"),
    (r"(?i)\\b0x[0-9a-f]+\\b", "<hex>"),
    (r"(?i)\\b(?=[0-9a-f]*\\d)[0-9a-f]{12,}\\b", "<id>"),
    (r"\\d+([.,]\\d+)*", "<n>"),
    (r"\\s+", " "),
)


@dataclass
class Sample:
    """One dead letter as an example of its kind."""

    id: int  # dlqId, as in /api/v1/dlq
    partition: str
    group: str | None
    transaction_id: str
    failed_at: datetime
    error: str
    payload: str | None  # its beginning; None = encrypted, or gone meanwhile


@dataclass
class ErrorKind:
    """Dead letters of one queue with the same kind of error."""

    error: str
    queue: str
    count: int
    groups: list[str]
    attempts: int  # most of any
    first: datetime
    last: datetime
    samples: list[Sample] = field(default_factory=list)


@dataclass
class Letters:
    """The dead letters of a period, by kind."""

    since: datetime
    until: datetime
    total: int
    kinds: list[ErrorKind]  # the most frequent first
    times: dict[tuple[str, str], dict[datetime, int]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class ReportOptions:
    database: str | None = None
    queues: Sequence[str] = ()
    since: str | datetime | None = None
    until: str | datetime | None = None
    samples: int = 3
    html: str | Path | None = None


def dlq_report(spark: Any, options: ReportOptions, say: Say = quiet) -> Letters:
    """Group the dead letters that failed from `since` (the first) to `until` (now)."""
    if not 0 <= options.samples <= 100:
        raise InvalidRequest("samples is between 0 and 100")
    html_report.check_target(options.html)
    postgres = postgres_frames.database_at(options.database)
    ((now,),) = postgres.rows("SELECT clock_timestamp()")
    end = moment(options.until, now, "until") if options.until else now
    begin = moment(options.since, now, "since") if options.since else None
    queries = _queries(postgres, options.queues, begin, end)
    figures = _collect(activate(spark), postgres, queries, begin, end, options.samples)
    say(f"{figures.total} dead letters of {len(figures.kinds)} kinds")
    _add_payloads(postgres, figures.kinds)
    if options.html:
        html_report.write(build(figures), options.html)
    return figures


def _queries(
    postgres: Postgres, queues: Sequence[str], since: datetime | None, until: datetime
) -> list[str]:
    where = f"AND d.failed_at >= '{since.isoformat()}' " if since else ""
    if queues:
        ids = postgres_frames.queue_ids(postgres, queues).values()
        where += f"AND d.queue_id IN ({', '.join(map(str, ids))}) "
    end = until.isoformat()
    ((first, last, count),) = postgres.rows(
        "SELECT min(d.id), max(d.id), count(*)" + SOURCE.format(until=end, where=where)
    )
    if not count:
        return []
    shares = min(TASKS, -(-count // LETTERS_PER_TASK))
    step = -(-(last - first + 1) // shares)
    return [
        READ.format(until=end, where=where + f"AND d.id >= {at} AND d.id < {at + step}")
        for at in range(first, last + 1, step)
    ]


def _collect(
    spark: Any,
    postgres: Postgres,
    queries: list[str],
    since: datetime | None,
    until: datetime,
    samples: int,
) -> Letters:
    if not queries:
        return Letters(since or until - timedelta(days=1), until, 0, [])
    letters = postgres_frames.read(spark, postgres, queries, LETTERS).withColumn(
        "kind", f.expr(signature("error"))
    )
    nth = f.row_number().over(Window.partitionBy("kind", "queue").orderBy(f.desc("id")))
    error = f.substring("error", 1, 2000).alias("error")
    sample = f.struct("id", "partition", "consumer", "transaction", "at", error)
    grouped = letters.withColumn("nth", nth).groupBy(
        "kind", "queue", f.date_trunc("minute", "at").alias("minute")
    )
    rows = grouped.agg(
        f.count("*").alias("count"),
        f.collect_set("consumer").alias("groups"),
        f.max("attempts").alias("attempts"),
        f.min("at").alias("first"),
        f.max("at").alias("last"),
        f.collect_list(f.when(f.col("nth") <= samples, sample)).alias("samples"),
    ).collect()
    kinds: dict[tuple[str, str], ErrorKind] = {}
    times: dict[tuple[str, str], dict[datetime, int]] = defaultdict(dict)
    for row in rows:
        first, last = row["first"].astimezone(UTC), row["last"].astimezone(UTC)
        key = (row.kind, row.queue)
        one = kinds.setdefault(key, ErrorKind(row.kind, row.queue, 0, [], 0, first, last))
        one.count += row["count"]
        one.groups = sorted({*one.groups, *row.groups})
        one.attempts = max(one.attempts, row.attempts)
        one.first, one.last = min(one.first, first), max(one.last, last)
        for dlq_id, partition, group, transaction, at, text in row.samples:
            failed = at.astimezone(UTC)
            one.samples.append(Sample(dlq_id, partition, group, transaction, failed, text, None))
        times[key][minute_of(row.minute.astimezone(UTC))] = row["count"]
    for one in kinds.values():
        one.samples.sort(key=lambda sample: -sample.id)
    ordered = sorted(kinds.values(), key=lambda kind: (-kind.count, kind.queue, kind.error))
    start = since or minute_of(min(kind.first for kind in ordered))
    return Letters(start, until, sum(kind.count for kind in ordered), ordered, dict(times))


def signature(column: str) -> str:
    """Return a SQL expression: the error's text without ids, numbers and times."""
    lines = f"split(trim({column}), '\\n')"
    line = f"trim(element_at({lines}, IF(startswith({column}, 'Traceback'), -1, 1)))"
    for pattern, replacement in PATTERNS:
        line = f"regexp_replace({line}, '{pattern}', '{replacement}')"
    return f"IF(length({line}) = 0, '(no text)', left({line}, {MAX_ERROR_CHARACTERS}))"


def _add_payloads(postgres: Postgres, kinds: list[ErrorKind]) -> None:
    samples = {sample.id: sample for kind in kinds for sample in kind.samples}
    ids = list(map(str, samples))
    for begin in range(0, len(ids), 1000):
        rows = postgres.rows(
            f"SELECT id, substring(payload FROM 1 FOR {MAX_PAYLOAD_BYTES}) FROM dead_letters "
            f"WHERE key_id IS NULL AND id IN ({', '.join(ids[begin : begin + 1000])})"
        )
        for dlq_id, payload in rows:
            samples[dlq_id].payload = payload.decode("utf-8", "replace")


def build(figures: Letters) -> HtmlReport:
    window = (figures.since, minute_of(figures.until) + MINUTE)
    minutes = [minute for counts in figures.times.values() for minute in counts]
    since, until = html_report.fit(*window, minutes)
    step, called = html_report.bins(since, until)
    times = html_report.times_of(since, until, step)
    place = {at: index for index, at in enumerate(times)}

    def over_time(label: Callable[[tuple[str, str]], str]) -> list[ChartSeries]:
        series: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(times))
        for key, counts in figures.times.items():
            for minute, count in counts.items():
                at = datetime.fromtimestamp(int(minute.timestamp()) // step * step, UTC)
                series[label(key)][place[at]] += count
        ranks = sorted(series, key=lambda name: (-sum(series[name]), name))
        return top({name: list(values) for name, values in series.items()}, ranks)

    kinds, samples = [], []
    for kind in figures.kinds[:100]:
        what = [kind.error, kind.queue, ", ".join(kind.groups)]
        counts = [number(kind.count), number(kind.attempts)]
        kinds.append([*what, *counts, f"{kind.first:{SECOND}}", f"{kind.last:{SECOND}}"])
        for sample in kind.samples:
            payload = "(encrypted)" if sample.payload is None else sample.payload
            where = [kind.queue, sample.partition, sample.transaction_id]
            samples.append([sample.error, payload, *where, f"{sample.failed_at:{SECOND}}"])
    last = max((kind.last for kind in figures.kinds), default=None)
    none, unit = "no dead letters", f"dead letters {called}"
    of_kinds = ["error", "queue", "groups", "count", "most attempts", "first", "last"]
    of_samples = ["error", "payload", "queue", "partition", "transactionId", "failed"]
    return HtmlReport(
        "Penstock: dead letters",
        since,
        until,
        times,
        [
            Panel("By error", unit, over_time(lambda key: short(key[0], 60)), "bar", none),
            Panel("By queue", unit, over_time(lambda key: key[1]), "bar", none),
        ],
        [
            ("dead letters", number(figures.total)),
            ("kinds of errors", number(len({kind.error for kind in figures.kinds}))),
            ("queues", number(len({kind.queue for kind in figures.kinds}))),
            ("last one", f"{last:%m-%d %H:%M}" if last else "–"),
        ],
        [
            ReportTable("Errors", of_kinds, kinds, none, text=3),
            ReportTable("Samples", of_samples, samples, none, text=6),
        ],
        ["Put them back with `penstock queue dlq requeue` once the cause is gone. Times are UTC."],
        step=called,
        window=window,
    )
