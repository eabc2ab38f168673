-- lagging_partitions: partitions whose oldest message that a group has not settled is old, the oldest first; of each group's first
-- 10,000 lagging partitions. $1 seconds, $2 limit
WITH page AS MATERIALIZED (
  SELECT g.id AS group_id, q.id AS queue_id, c.id
    FROM groups g JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL
   CROSS JOIN LATERAL (
     SELECT c.partition_id AS id
       FROM (SELECT c.partition_id, c.position FROM cursors c WHERE c.group_id = g.id AND c.due_at IS NOT NULL
              ORDER BY c.due_at LIMIT 10000) c
      CROSS JOIN LATERAL (SELECT m.created_at FROM messages m WHERE m.partition_id = c.partition_id
                             AND m.seq > c.position ORDER BY m.seq LIMIT 1) oldest
      WHERE oldest.created_at < clock_timestamp() - make_interval(secs => $1)
      ORDER BY oldest.created_at LIMIT $2) c)
SELECT g.name AS group, q.name AS queue, p.id, p.name, c.position, c.settled, c.consumed, c.batches, c.consumed_at,
       c.next_expiry > clock_timestamp() AND NOT isempty(c.leased) AS leased, c.lease_id,
       coalesce(head.seq, p.floor) AS head, coalesce(first.seq - 1, p.floor) AS below, first_open.created_at AS oldest,
       clock_timestamp() AS now,
       coalesce((SELECT sum(upper(r) - lower(r)) FROM unnest(c.settled) r), 0)::bigint AS beyond
  FROM page JOIN groups g ON g.id = page.group_id JOIN queues q ON q.id = page.queue_id
  JOIN partitions p ON p.id = page.id
  JOIN LATERAL (SELECT * FROM cursors c WHERE c.partition_id = p.id AND c.group_id = g.id
                 ORDER BY c.version DESC LIMIT 1) c ON true
  LEFT JOIN LATERAL (SELECT m.seq FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq DESC LIMIT 1) head ON true
  LEFT JOIN LATERAL (SELECT m.seq FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq LIMIT 1) first ON true
  LEFT JOIN LATERAL (SELECT m.created_at FROM messages m WHERE m.partition_id = p.id AND m.seq > c.position
                      ORDER BY m.seq LIMIT 1) first_open ON true
 WHERE first_open.created_at < clock_timestamp() - make_interval(secs => $1)
 ORDER BY first_open.created_at LIMIT $2;
