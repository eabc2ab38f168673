"""The frames that `rollup` is made of: rows per minute of topics, of queues and of their groups.

Lag needs no sampling. `history.level` is, at the end of a minute in which something changed, how
many messages the queue stored or how many of those the group had consumed; between two changes it
is what the later one began with, and after the last one what the counters say now.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql import functions as f

from penstock.pipeline.jobs import postgres_frames
from penstock.pipeline.source_columns import TIMESTAMP as TIME
from penstock.pipeline.source_columns import ddl
from penstock.pipeline.sources.postgres import Postgres

HISTORY_PER_TASK = timedelta(hours=6)  # of history, for one task
SMALL_QUEUE_MESSAGES = 100_000  # queues up to here are read together
QUEUES_PER_QUERY = 50


def _columns(numbers: str, texts: str = "", arrays: dict[str, pa.DataType] | None = None) -> Any:
    return pa.schema(
        {
            "minute": TIME,
            **dict.fromkeys(texts.split(), pa.string()),
            **dict.fromkeys(numbers.split(), pa.int64()),
            **(arrays or {}),
        }
    )


LATENCIES = {"latency_buckets": pa.list_(pa.int16()), "latency_counts": pa.list_(pa.int64())}
BYTES = _columns("queue bytes")
HISTORY = _columns(
    "queue group pushed acked failed retried dead dropped level moved", arrays=LATENCIES
)
ROWS = _columns(
    "pushed bytes acked failed retried dead dropped lag", "kind name group_name", LATENCIES
)

PARTITIONS = """
  SELECT min(x.id), max(x.id) FROM (
    SELECT p.id, ntile({tasks}) OVER (ORDER BY p.id) AS share
      FROM partitions p WHERE p.queue_id = {queue}) x
   GROUP BY x.share"""

BYTES_SQL = """
  SELECT date_trunc('minute', m.created_at), p.queue_id::bigint,
         sum(octet_length(m.payload))::bigint
    FROM partitions p CROSS JOIN LATERAL (
      SELECT queue_seq_at(p.id, '{since}'::timestamptz - interval '1 microsecond') AS after,
             queue_seq_at(p.id, '{until}'::timestamptz - interval '1 microsecond') AS upto) r
    JOIN messages m ON m.partition_id = p.id AND m.seq > r.after AND m.seq <= r.upto
   WHERE p.queue_id IN ({queues}) {where} GROUP BY 1, 2"""

HISTORY_SQL = """
  SELECT minute, queue_id::bigint, group_id::bigint, pushed, done - dead - dropped, failed,
         retried, dead, dropped, level, moved, latency_buckets, latency_counts
    FROM history WHERE minute >= '{since}' AND minute < '{until}' AND queue_id IN ({queues})"""

LEVELS = """
  SELECT queue_id, group_id,
         CASE WHEN group_id = 0 THEN sum(pushed) - sum(removed) ELSE sum(consumed) END::bigint
    FROM (SELECT queue_id, group_id, pushed, removed, consumed FROM tallies
          UNION ALL SELECT queue_id, group_id, pushed, removed, consumed FROM tally_log) t
   WHERE queue_id IN ({queues}) GROUP BY 1, 2"""


@dataclass
class Catalog:
    """Queues and groups by number, as they were when the run began."""

    queues: dict[int, str]
    groups: dict[int, dict[int, str]]  # of each queue

    @property
    def numbers(self) -> str:
        return ", ".join(map(str, self.queues))


def topic_minutes(
    spark: Any, broker: str, token: str | None, names: list[str], since: datetime, until: datetime
) -> Any:
    """A row for every minute in which something was appended to a topic."""
    options = {
        "broker": broker,
        "token": token or "",
        "topic": ",".join(names),
        "startingTimestamp": since.isoformat(),
        "endingTimestamp": until.isoformat(),
        # what retention takes away meanwhile was counted by the runs before
        "failOnDataLoss": "false",
    }
    records = (
        spark.read.format("penstock")
        .options(**options)
        .schema("topic STRING, timestamp TIMESTAMP, payload BINARY")
    )
    minutes = records.load().groupBy(f.date_trunc("minute", "timestamp").alias("minute"), "topic")
    counted = minutes.agg(f.count("*").alias("pushed"), f.sum(f.length("payload")).alias("bytes"))
    return counted.selectExpr(
        "minute", "'topic' AS kind", "topic AS name", "'' AS group_name", "pushed", "bytes"
    )


def queue_minutes(
    spark: Any, postgres: Postgres, catalog: Catalog, since: datetime, until: datetime, tasks: int
) -> Any:
    """A row for every minute in which something happened: of the queue, and of each group."""
    levels = levels_now(postgres, catalog)
    history = postgres_frames.read(spark, postgres, history_queries(catalog, since), HISTORY)
    stored = postgres_frames.read(
        spark, postgres, bytes_queries(postgres, catalog, levels, since, until, tasks), BYTES
    )
    minutes = history.unionByName(
        stored.withColumn("group", f.lit(0).cast("long")), allowMissingColumns=True
    )
    return minutes.groupBy("queue").applyInArrow(_merger(catalog, levels, until), ddl(ROWS))


def history_queries(catalog: Catalog, since: datetime) -> list[str]:
    """The broker's minutes up to now: what changes after the window says what held at its end."""
    spans = _spans(since, datetime.now(UTC) + timedelta(hours=1), HISTORY_PER_TASK)
    return [HISTORY_SQL.format(queues=catalog.numbers, **span) for span in spans]


def _spans(since: datetime, until: datetime, length: timedelta) -> Iterator[dict[str, str]]:
    """The time in pieces of this length, for SQL; the last one may reach beyond `until`."""
    while since < until:
        yield {"since": since.isoformat(), "until": (since + length).isoformat()}
        since += length


def _merger(
    catalog: Catalog, levels: dict[tuple[int, int], int], until: datetime
) -> Callable[[pa.Table], pa.Table]:
    queues, groups = catalog.queues, catalog.groups

    def merge(rows: pa.Table) -> pa.Table:
        queue = rows.column("queue")[0].as_py()
        now = {group: levels.get((queue, group), 0) for group in (0, *groups[queue])}
        made = merge_queue(rows.to_pylist(), queues[queue], groups[queue], now.__getitem__)
        return pa.Table.from_pylist([row for row in made if row["minute"] < until], schema=ROWS)

    return merge


def merge_queue(
    rows: list[dict[str, Any]], queue: str, groups: dict[int, str], level_now: Callable[[int], int]
) -> Iterator[dict[str, Any]]:
    """The rows of one queue, from what was counted of it and of its groups, with lag filled in."""
    counted: dict[tuple[int, datetime], dict[str, Any]] = {}
    for row in rows:
        place = counted.setdefault((row["group"], row["minute"]), {"level": None, "moved": 0})
        for name, value in row.items():
            if value is not None:
                # the history's row and that of the bytes have no column in common but the keys
                place[name] = value
    minutes = sorted({minute for _, minute in counted})
    stored = _levels(0, minutes, counted, level_now(0))
    for group, name in {0: "", **groups}.items():
        consumed = _levels(group, minutes, counted, level_now(group))
        for minute in minutes:
            row = counted.get((group, minute), {})
            same = {column: row.get(column) for column in ROWS.names}
            yield {
                **same,
                "minute": minute,
                "kind": "group" if group else "queue",
                "name": queue,
                "group_name": name,
                "lag": max(0, stored[minute] - consumed[minute]) if group else None,
            }


def _levels(
    group: int,
    minutes: list[datetime],
    counted: dict[tuple[int, datetime], dict[str, Any]],
    now: int,
) -> dict[datetime, int]:
    """The level at the end of each minute; backwards: before a change it is its beginning."""
    levels, following = {}, now
    for minute in reversed(minutes):
        row = counted.get((group, minute))
        if row is not None and row["level"] is not None:
            levels[minute] = row["level"]
            following = row["level"] - row["moved"]
        else:
            levels[minute] = following
    return levels


def levels_now(postgres: Postgres, catalog: Catalog) -> dict[tuple[int, int], int]:
    """What the counters say: messages stored by (queue, 0), of those consumed by (queue, group)."""
    rows = postgres.rows(LEVELS.format(queues=catalog.numbers))
    return {(queue, group): level for queue, group, level in rows}


def bytes_queries(
    postgres: Postgres,
    catalog: Catalog,
    levels: dict[tuple[int, int], int],
    since: datetime,
    until: datetime,
    tasks: int,
) -> list[str]:
    """Queries over the stored messages, one task each: some small queues, or a share of a large
    one (of its partitions, or of the time when these are fewer than tasks)."""
    whole = {"since": since.isoformat(), "until": until.isoformat()}
    large = [queue for queue in catalog.queues if levels.get((queue, 0), 0) > SMALL_QUEUE_MESSAGES]
    small = [str(queue) for queue in catalog.queues if queue not in large]
    queries = [
        BYTES_SQL.format(
            queues=", ".join(small[begin : begin + QUEUES_PER_QUERY]), where="", **whole
        )
        for begin in range(0, len(small), QUEUES_PER_QUERY)
    ]
    for queue in large:
        shares = postgres.rows(PARTITIONS.format(tasks=tasks, queue=queue))
        if len(shares) == tasks:
            ranges = (f"AND p.id BETWEEN {first} AND {last}" for first, last in shares)
            queries += [BYTES_SQL.format(queues=queue, where=where, **whole) for where in ranges]
        else:
            spans = list(_spans(since, until, max(timedelta(minutes=1), (until - since) / tasks)))
            spans[-1]["until"] = whole["until"]
            queries += [BYTES_SQL.format(queues=queue, where="", **span) for span in spans]
    return queries
