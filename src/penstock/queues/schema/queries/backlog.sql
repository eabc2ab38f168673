-- backlog: when the oldest message was pushed that a group has not finished with, and in how many partitions there is one;
-- looked for in up to $2 lagging partitions of each group. $1 ids of groups
SELECT g.id AS group_id, count(m.created_at) AS partitions, min(m.created_at) AS oldest, clock_timestamp() AS now
  FROM unnest($1::int[]) g (id)
  LEFT JOIN LATERAL (SELECT c.partition_id, c.position FROM cursors c
                      WHERE c.group_id = g.id AND c.due_at IS NOT NULL ORDER BY c.due_at LIMIT $2) c ON true
  LEFT JOIN LATERAL (SELECT m.created_at FROM messages m WHERE m.partition_id = c.partition_id AND m.seq > c.position
                      ORDER BY m.seq LIMIT 1) m ON true
 GROUP BY g.id;
