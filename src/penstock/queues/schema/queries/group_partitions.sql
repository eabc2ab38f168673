-- group_partitions: a page of partitions as a group sees them. The page is cut before anything is looked up for its partitions.
-- $1 group, $2 limit, $3 offset
WITH page AS MATERIALIZED (
  SELECT g.id AS group_id, q.id AS queue_id, p.id, q.name
    FROM groups g JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL
   CROSS JOIN LATERAL (SELECT p.id FROM partitions p WHERE p.queue_id = q.id ORDER BY p.queue_id, p.id
                        LIMIT $2::bigint + $3::bigint) p
   WHERE g.name = $1 ORDER BY q.name, p.id LIMIT $2 OFFSET $3)
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
 ORDER BY q.name, p.id;
