-- Partitions of a queue as a group sees them, those with the most waiting messages first. Considers up to $4 partitions that
-- have messages for the group, and the first $4 by number. $1 queue, $2 group, $3 part of the name ('' = all), $5 limit, $6 offset
WITH one_group AS MATERIALIZED (
  SELECT g.id AS group_id, g.queue_id FROM groups g JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL
   WHERE q.name = $1 AND g.name = $2
), candidates AS MATERIALIZED (
  (SELECT c.partition_id AS id FROM one_group JOIN cursors c ON c.group_id = one_group.group_id
    WHERE c.due_at IS NOT NULL ORDER BY c.due_at LIMIT $4)
  UNION
  (SELECT p.id FROM one_group JOIN partitions p ON p.queue_id = one_group.queue_id
    WHERE $3 = '' OR strpos(lower(p.name), lower($3)) > 0 ORDER BY p.queue_id, p.id LIMIT $4)
), seen AS MATERIALIZED (
  SELECT p.id, p.name, coalesce(head.seq, p.floor) AS head, coalesce(first.seq - 1, p.floor) AS below,
         head.created_at AS newest, c.position, c.leased, c.next_expiry, c.lease_id, c.consumed_at,
         coalesce((SELECT sum(upper(r) - lower(r)) FROM unnest(c.settled) r), 0)::bigint AS beyond,
         first_open.created_at AS oldest
    FROM candidates x JOIN partitions p ON p.id = x.id CROSS JOIN one_group
    LEFT JOIN LATERAL (SELECT * FROM cursors c WHERE c.partition_id = p.id AND c.group_id = one_group.group_id
                        ORDER BY c.version DESC LIMIT 1) c ON true
    LEFT JOIN LATERAL (SELECT m.seq, m.created_at FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq DESC LIMIT 1) head ON true
    LEFT JOIN LATERAL (SELECT m.seq FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq LIMIT 1) first ON true
    LEFT JOIN LATERAL (SELECT m.created_at FROM messages m WHERE m.partition_id = p.id AND m.seq > coalesce(c.position, 0)
                        ORDER BY m.seq LIMIT 1) first_open ON true
   WHERE $3 = '' OR strpos(lower(p.name), lower($3)) > 0
)
SELECT id, name, head - below AS stored, greatest(0, head - greatest(coalesce(position, 0), below) - beyond) AS waiting,
       oldest, newest, consumed_at, clock_timestamp() AS now,
       CASE WHEN next_expiry > clock_timestamp()
            THEN coalesce((SELECT sum(upper(r) - lower(r)) FROM unnest(leased) r), 0)::bigint ELSE 0 END AS leased,
       next_expiry, lease_id, count(*) OVER () AS total
  FROM seen ORDER BY waiting DESC, name LIMIT $5 OFFSET $6
