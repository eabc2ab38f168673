"""The frames that `rollup` is made of: rows per minute of topics, of queues and of their groups.

Lag needs no sampling. `history.level` is, at the end of a minute in which something changed, how
many messages the queue stored or how many of those the group had settled; between two changes it is
what the later one began with, and after the last one what the counters say now.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from penstock.pipeline.jobs import postgres_frames
from penstock.pipeline.sources.postgres import Postgres

HISTORY_PER_TASK = timedelta(hours=6)  # of history, for one task
SMALL = 100_000  # messages; queues up to here are read together
TOGETHER = 50

TIME = pa.timestamp("us", tz="UTC")
BYTES = pa.schema([("minute", TIME), ("queue", pa.int64()), ("bytes", pa.int64())])
HISTORY = pa.schema(
    [
        ("minute", TIME),
        ("queue", pa.int64()),
        ("group", pa.int64()),
        *(
            (name, pa.int64())
            for name in (
                "pushed",
                "acked",
                "failed",
                "retried",
                "dead",
                "dropped",
                "level",
                "moved",
            )
        ),
        ("latency_buckets", pa.list_(pa.int16())),
        ("latency_counts", pa.list_(pa.int64())),
    ]
)
ROWS = pa.schema(
    [
        ("minute", TIME),
        *((name, pa.string()) for name in ("kind", "name", "group_name")),
        *(
            (name, pa.int64())
            for name in ("pushed", "bytes", "acked", "failed", "retried", "dead", "dropped", "lag")
        ),
        ("latency_buckets", pa.list_(pa.int16())),
        ("latency_counts", pa.list_(pa.int64())),
    ]
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
class Known:
    """Queues and groups by number, as they were when the run began."""

    queues: dict[int, str] = field(default_factory=dict)
    groups: dict[int, tuple[int, str]] = field(default_factory=dict)  # group -> queue, name

    @property
    def numbers(self) -> str:
        """The queues' ids for an SQL list."""
        return ", ".join(map(str, self.queues))


def topic_minutes(
    spark: Any, broker: str, token: str | None, names: list[str], since: datetime, until: datetime
) -> Any:
    """A row for every minute in which something was appended to a topic."""
    from pyspark.sql import functions as f

    options = {
        "broker": broker,
        **({"token": token} if token else {}),
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
    return counted.select("minute", f.lit("topic").alias("kind"), f.col("topic").alias("name"),
                          f.lit("").alias("group_name"), "pushed", "bytes")  # fmt: skip


def queue_minutes(
    spark: Any, postgres: Postgres, known: Known, since: datetime, until: datetime, tasks: int
) -> Any:
    """A row for every minute in which something happened in a queue: of the queue, and of each of
    its groups.
    """
    from pyspark.sql import functions as f

    levels = levels_now(postgres, known)
    history = postgres_frames.read(spark, postgres, history_queries(known, since), HISTORY)
    stored = postgres_frames.read(
        spark, postgres, bytes_queries(postgres, known, levels, since, until, tasks), BYTES
    )
    minutes = history.unionByName(
        stored.withColumn("group", f.lit(0).cast("long")), allowMissingColumns=True
    )
    return minutes.groupBy("queue").applyInArrow(
        _merger(known, levels, until), postgres_frames.ddl(ROWS)
    )


def history_queries(known: Known, since: datetime) -> list[str]:
    """The broker's minutes up to the present: what changes after the window tells what held at its
    end.
    """
    queries, start, now = [], since, datetime.now(UTC) + timedelta(hours=1)
    while start < now:
        part = {
            "since": start.isoformat(),
            "until": (start + HISTORY_PER_TASK).isoformat(),
            "queues": known.numbers,
        }
        queries.append(HISTORY_SQL.format(**part))
        start += HISTORY_PER_TASK
    return queries


def _merger(
    known: Known, levels: dict[tuple[int, int], int], until: datetime
) -> Callable[[pa.Table], pa.Table]:
    groups: dict[int, dict[int, str]] = {queue: {} for queue in known.queues}
    for number, (queue, name) in known.groups.items():
        groups[queue][number] = name
    queues = known.queues

    def merge(rows: pa.Table) -> pa.Table:
        queue = rows.column("queue")[0].as_py()
        made = merge_queue(
            rows.to_pylist(),
            queues[queue],
            groups[queue],
            lambda group: levels.get((queue, group), 0),
        )
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
        settled = _levels(group, minutes, counted, level_now(group))
        for minute in minutes:
            row = counted.get((group, minute), {})
            same = {column: row.get(column) for column in ROWS.names}
            yield {
                **same,
                "minute": minute,
                "kind": "group" if group else "queue",
                "name": queue,
                "group_name": name,
                "lag": max(0, stored[minute] - settled[minute]) if group else None,
            }


def _levels(
    group: int,
    minutes: list[datetime],
    counted: dict[tuple[int, datetime], dict[str, Any]],
    now: int,
) -> dict[datetime, int]:
    """The level at the end of each minute; backwards, because before a change it is what the change
    began with.
    """
    levels, following = {}, now
    for minute in reversed(minutes):
        row = counted.get((group, minute))
        if row is not None and row["level"] is not None:
            levels[minute] = row["level"]
            following = row["level"] - row["moved"]
        else:
            levels[minute] = following
    return levels


def levels_now(postgres: Postgres, known: Known) -> dict[tuple[int, int], int]:
    """What the counters say: messages stored by (queue, 0), of those settled by (queue, group)."""
    rows = postgres.rows(LEVELS.format(queues=known.numbers))
    return {(queue, group): level for queue, group, level in rows}


def bytes_queries(
    postgres: Postgres,
    known: Known,
    levels: dict[tuple[int, int], int],
    since: datetime,
    until: datetime,
    tasks: int,
) -> list[str]:
    """Queries over the stored messages, one task each: some small queues, or a share of a large
    one.

    A large queue is shared out by partitions, or by time when it has fewer partitions than there
    are tasks.
    """
    whole = {"since": since.isoformat(), "until": until.isoformat()}
    small = [str(queue) for queue in known.queues if levels.get((queue, 0), 0) <= SMALL]
    queries = [
        BYTES_SQL.format(queues=", ".join(small[begin : begin + TOGETHER]), where="", **whole)
        for begin in range(0, len(small), TOGETHER)
    ]
    for queue in known.queues:
        if levels.get((queue, 0), 0) <= SMALL:
            continue
        shares = postgres.rows(PARTITIONS.format(tasks=tasks, queue=queue))
        if len(shares) == tasks:
            queries += [
                BYTES_SQL.format(
                    queues=queue, where=f"AND p.id BETWEEN {first} AND {last}", **whole
                )
                for first, last in shares
            ]
            continue
        step, start = max(timedelta(minutes=1), (until - since) / tasks), since
        while start < until:
            part = {"since": start.isoformat(), "until": min(until, start + step).isoformat()}
            queries.append(BYTES_SQL.format(queues=queue, where="", **part))
            start += step
    return queries
