"""Archive what each group did with a queue's messages, in the column `_outcomes`.

PostgreSQL reports the state of a message when its step is archived. So only messages older than a
given age are archived: most groups have finished them by then. The column has an element per group:

    outcome    completed, dead, leased or waiting
    attempts   how many deliveries of the message to the group have ended, if the queue records
               that; otherwise the number of failures of messages that are not completed
    error      the last error of a message that failed and is not completed
    latencyMs  from push to dead letter; for completed messages from push to the end of their last
               lease, if the queue records that

A queue records deliveries with its option `recordDeliveries`, a row per lease and not per message
(migration `0018_deliveries.sql`).
"""

from typing import Any

import pyarrow as pa
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_type

from penstock.pipeline.jobs import postgres_frames
from penstock.pipeline.lake.typed_columns import OUTCOMES
from penstock.pipeline.sources.queue import QueuePlan

_GROUP = {"group": pa.string(), "outcome": pa.string(), "attempts": pa.int32()}
_GROUP |= {"error": pa.string(), "latencyMs": pa.int64()}
FIELD = pa.field(OUTCOMES, pa.list_(pa.struct(_GROUP)))
MESSAGES_PER_QUERY = 100_000
_SCHEMA = pa.schema([("_partition", pa.string()), ("_seq", pa.int64()), ("_json", pa.string())])
_QUERY = """
WITH m AS MATERIALIZED (
  SELECT m.partition_id, m.seq, m.created_at FROM messages m
   WHERE m.queue_id = {queue} AND m.xid >= '{low}'::xid8 AND m.xid < '{high}'::xid8
), spans AS (
  SELECT m.partition_id, int8multirange(int8range(min(m.seq), max(m.seq), '[]')) AS seqs
    FROM m GROUP BY 1
), given AS (
  SELECT d.partition_id, d.group_id, s.seq, count(*) AS times, max(d.ended_at) AS ended_at
    FROM deliveries d JOIN spans p USING (partition_id)
   CROSS JOIN LATERAL unnest(d.seqs * p.seqs) r
   CROSS JOIN LATERAL generate_series(lower(r), upper(r) - 1) s (seq)
   WHERE d.queue_id = {queue} AND d.ended_at >= (SELECT min(m.created_at) FROM m)
   GROUP BY 1, 2, 3
)
SELECT p.name, m.seq, coalesce(json_agg(json_build_object(
         'group', g.name,
         'outcome', CASE WHEN d.seq IS NOT NULL THEN 'dead' WHEN c.done THEN 'completed'
                         WHEN c.leased @> m.seq THEN 'leased' ELSE 'waiting' END,
         'attempts', greatest(v.times, d.attempts, a.attempts),
         'error', coalesce(d.error, a.error),
         'latencyMs', (extract(epoch FROM coalesce(
            d.failed_at, CASE WHEN c.done THEN v.ended_at END) - m.created_at) * 1000)::bigint
       ) ORDER BY g.name) FILTER (WHERE g.id IS NOT NULL), '[]')::text
  FROM m
  JOIN partitions p ON p.id = m.partition_id
  LEFT JOIN groups g ON g.queue_id = {queue}
  LEFT JOIN LATERAL (SELECT c.position >= m.seq OR c.settled @> m.seq AS done, c.leased
                       FROM cursors c WHERE c.partition_id = m.partition_id
                        AND c.group_id = g.id ORDER BY c.version DESC LIMIT 1) c ON true
  LEFT JOIN given v ON v.partition_id = m.partition_id AND v.group_id = g.id AND v.seq = m.seq
  LEFT JOIN attempts a ON a.partition_id = m.partition_id AND a.group_id = g.id AND a.seq = m.seq
  LEFT JOIN LATERAL (SELECT * FROM dead_letters d WHERE d.partition_id = m.partition_id
                        AND d.seq = m.seq AND d.group_id = g.id
                      ORDER BY d.id DESC LIMIT 1) d ON true
 GROUP BY p.name, m.seq
"""


def older_than(options: QueuePlan, queue: int, low: int, high: int, minutes: float) -> int:
    """Return the horizon below which all messages from `low` on are at least this old."""
    rows = options.postgres.rows(
        f"SELECT min(m.xid::text::numeric)::bigint FROM messages m WHERE m.queue_id = {queue} "
        f"AND m.xid >= '{low}'::xid8 AND m.xid < '{high}'::xid8 "
        f"AND m.created_at > clock_timestamp() - interval '{minutes:f} minutes'"
    )
    young = rows[0][0]
    return high if young is None else min(high, int(young))


def with_outcomes(spark: Any, frame: Any, options: QueuePlan, low: int, high: int) -> Any:
    """Return the messages of a range of transactions, with the column."""
    queue = options.state().id
    queries = [
        _QUERY.format(queue=queue, low=first, high=last)
        for first, last in _ranges(options, queue, low, high)
    ]
    rows = postgres_frames.read(spark, options.postgres, queries, _SCHEMA)
    kind: Any = from_arrow_type(FIELD.type)
    rows = rows.withColumn(OUTCOMES, f.from_json("_json", kind)).drop("_json")
    same = (frame.partition == rows._partition) & (frame.seq == rows._seq)
    return frame.join(rows, same, "left").drop("_partition", "_seq")


def _ranges(options: QueuePlan, queue: int, low: int, high: int) -> list[tuple[int, int]]:
    """Split the range at transactions into parts of about MESSAGES_PER_QUERY."""
    parts = []
    while low < high:
        past = options.nth_xid(queue, low, MESSAGES_PER_QUERY)
        end = high if past is None else min(high, max(past, low + 1))
        parts.append((low, end))
        low = end
    return parts
