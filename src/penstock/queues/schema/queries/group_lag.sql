-- group_lag: how many messages of a queue a group has not settled.
-- $1 group, $2 queue
SELECT coalesce(sum(c.pushed - c.removed) FILTER (WHERE c.group_id = 0), 0)
       - coalesce(sum(c.consumed) FILTER (WHERE c.group_id = g.id), 0) AS lag
  FROM groups g JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL
  LEFT JOIN LATERAL queue_counts(q.id) c ON true
 WHERE g.name = $1 AND q.name = $2 GROUP BY g.id;
