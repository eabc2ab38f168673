-- lagging_partitions: partitions whose oldest message that a group has not settled is old, the oldest first; of each group's first
-- 10,000 lagging partitions. $1 seconds, $2 limit
WITH page AS MATERIALIZED (
  SELECT g.id AS group_id, c.id
    FROM groups g JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL
   CROSS JOIN LATERAL (
     SELECT c.partition_id AS id
       FROM (SELECT c.partition_id, c.position FROM cursors c WHERE c.group_id = g.id AND c.due_at IS NOT NULL
              ORDER BY c.due_at LIMIT 10000) c
      CROSS JOIN LATERAL (SELECT m.created_at FROM messages m WHERE m.partition_id = c.partition_id
                             AND m.seq > c.position ORDER BY m.seq LIMIT 1) oldest
      WHERE oldest.created_at < clock_timestamp() - make_interval(secs => $1)
      ORDER BY oldest.created_at LIMIT $2) c)
SELECT l.* FROM page CROSS JOIN LATERAL queue_partition_lag(page.group_id, page.id) l
 WHERE l.oldest < clock_timestamp() - make_interval(secs => $1)
 ORDER BY l.oldest LIMIT $2;
