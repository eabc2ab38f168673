-- What changes slowly or costs more, for the groups given: dead letters that exist now (counted up to $2) and when the
-- oldest message was pushed that a group has not consumed (looked for in up to $3 partitions).
SELECT g.id AS group_id,
       (SELECT count(*) FROM (SELECT 1 FROM dead_letters d
                               WHERE d.queue_id = g.queue_id AND d.group_id = g.id LIMIT $2) d) AS dead_letters,
       (SELECT min(m.created_at)
          FROM (SELECT c.partition_id, c.position FROM cursors c
                 WHERE c.group_id = g.id AND c.due_at IS NOT NULL ORDER BY c.due_at LIMIT $3) c
         CROSS JOIN LATERAL (SELECT m.created_at FROM messages m
                              WHERE m.partition_id = c.partition_id AND m.seq > c.position
                              ORDER BY m.seq LIMIT 1) m) AS oldest
  FROM groups g WHERE g.id = ANY ($1::int[])
