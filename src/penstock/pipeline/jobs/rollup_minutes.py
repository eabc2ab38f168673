"""Build the frames of `rollup`: rows per minute of topics, of queues and of their groups.

Lag needs no sampling. `history.level` is the number of messages stored in the queue, or consumed by
the group, at the end of a minute with a change. Between two changes, the level is the one before
the later change. After the last change, it is the current counter.
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

HISTORY_PER_TASK = timedelta(hours=6)
SMALL_QUEUE_MESSAGES = 100_000  # smaller queues are read together
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
    """Queues and groups by number, as of the start of the run."""

    queues: dict[int, str]
    groups: dict[int, dict[int, str]]  # by queue

    @property
    def numbers(self) -> str:
        return ", ".join(map(str, self.queues))


def topic_minutes(
    spark: Any, broker: str, token: str | None, names: list[str], since: datetime, until: datetime
) -> Any:
    """Return a frame with a row for every minute with an append to a topic."""
    options = {
        "broker": broker,
        "token": token or "",
        "topic": ",".join(names),
        "startingTimestamp": since.isoformat(),
        "endingTimestamp": until.isoformat(),
        # earlier runs have counted what retention deletes during this one
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
    """Return a frame with a row per queue and per group for every minute with a change."""
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
    """Return queries for the minutes up to now: later changes give the levels at the end."""
    spans = _spans(since, datetime.now(UTC) + timedelta(hours=1), HISTORY_PER_TASK)
    return [HISTORY_SQL.format(queues=catalog.numbers, **span) for span in spans]


def _spans(since: datetime, until: datetime, length: timedelta) -> Iterator[dict[str, str]]:
    """Split a time span into pieces for SQL. The last one may end after `until`."""
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
    """Yield the rows of a queue and its groups with their lag, from their counts."""
    counted: dict[tuple[int, datetime], dict[str, Any]] = {}
    for row in rows:
        place = counted.setdefault((row["group"], row["minute"]), {"level": None, "moved": 0})
        for name, value in row.items():
            if value is not None:
                # the history row and the bytes row share only the key columns
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
    """Return the level at the end of each minute, going back from `now` by the changes."""
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
    """Return the counters: messages stored by (queue, 0), and consumed by (queue, group)."""
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
    """Return queries over stored messages, one per task: some small queues, or a part of a large
    one (by partitions, or by time if there are fewer partitions than tasks)."""
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
