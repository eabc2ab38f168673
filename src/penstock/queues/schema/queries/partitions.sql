-- partitions: partitions in the order they were made.
-- $1 queue (NULL = all), $2 limit, $3 offset, $4 only those after this id
WITH page AS MATERIALIZED (  -- in the order of the index on (queue, id): a page is cut, not sorted
  SELECT p.*, q.name AS queue FROM queues q
   CROSS JOIN LATERAL (SELECT * FROM partitions p WHERE p.queue_id = q.id AND p.id > $4
                        ORDER BY p.queue_id, p.id LIMIT $2::bigint + $3::bigint) p
   WHERE q.deleted_at IS NULL AND ($1::text IS NULL OR q.name = $1)
   ORDER BY p.id LIMIT $2 OFFSET $3)
SELECT p.id, p.name, p.queue, p.created_at, coalesce(last.seq - first.seq + 1 - p.holes, 0) AS messages,
       first.created_at AS oldest_message, last.created_at AS newest_message
  FROM page p
  LEFT JOIN LATERAL (SELECT m.seq, m.created_at FROM messages m WHERE m.partition_id = p.id
                      ORDER BY m.seq DESC LIMIT 1) last ON true
  LEFT JOIN LATERAL (SELECT m.seq, m.created_at FROM messages m WHERE m.partition_id = p.id
                      ORDER BY m.seq LIMIT 1) first ON true
 ORDER BY p.id;
