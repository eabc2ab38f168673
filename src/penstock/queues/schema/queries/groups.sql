-- groups: every group of every queue with its lag; the time lag is looked for in its first 10,000 lagging partitions.
-- $1 group, $2 queue; NULL = all
SELECT g.id, g.name, g.queue_id, q.name AS queue, g.mode, g.start_at, g.created_at, g.discovered < g.discover_to AS discovering,
       coalesce(total.stored, 0) - coalesce(mine.consumed, 0) AS lag, coalesce(mine.done, 0) AS done,
       coalesce(mine.failed, 0) AS failed, coalesce(mine.dead, 0) AS dead, coalesce(mine.dropped, 0) AS dropped,
       backlog.partitions, backlog.oldest, clock_timestamp() AS now
  FROM groups g JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL
  LEFT JOIN LATERAL (SELECT c.pushed - c.removed AS stored FROM queue_counts(q.id) c WHERE c.group_id = 0) total ON true
  LEFT JOIN LATERAL (SELECT c.* FROM queue_counts(q.id) c WHERE c.group_id = g.id) mine ON true
  LEFT JOIN LATERAL (
    SELECT count(*) AS partitions, min(m.created_at) AS oldest
      FROM (SELECT c.partition_id, c.position FROM cursors c WHERE c.group_id = g.id AND c.due_at IS NOT NULL
             ORDER BY c.due_at LIMIT 10000) c
     CROSS JOIN LATERAL (
        SELECT m.created_at FROM messages m WHERE m.partition_id = c.partition_id AND m.seq > c.position
         ORDER BY m.seq LIMIT 1) m) backlog ON true
 WHERE ($1::text IS NULL OR g.name = $1) AND ($2::text IS NULL OR q.name = $2)
 ORDER BY q.name, g.name;
