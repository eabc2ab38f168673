-- group_partitions: a page of partitions as a group sees them. The page is cut before anything is looked up for its partitions.
-- $1 group, $2 limit, $3 offset
WITH page AS MATERIALIZED (
  SELECT g.id AS group_id, p.id, q.name
    FROM groups g JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL
   CROSS JOIN LATERAL (SELECT p.id FROM partitions p WHERE p.queue_id = q.id ORDER BY p.queue_id, p.id
                        LIMIT $2::bigint + $3::bigint) p
   WHERE g.name = $1 ORDER BY q.name, p.id LIMIT $2 OFFSET $3)
SELECT l.* FROM page CROSS JOIN LATERAL queue_partition_lag(page.group_id, page.id) l ORDER BY page.name, page.id;
