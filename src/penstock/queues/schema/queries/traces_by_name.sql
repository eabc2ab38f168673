-- traces_by_name: traces of a name with their messages, the oldest first; payloads up to $4 bytes.
-- $1 name, $2 limit, $3 offset
WITH page AS MATERIALIZED (
  SELECT n.at AS named_at, t.*, q.name AS queue, p.name AS partition
    FROM trace_names n JOIN traces t ON t.id = n.trace_id
    JOIN partitions p ON p.id = t.partition_id JOIN queues q ON q.id = t.queue_id AND q.deleted_at IS NULL
   WHERE n.name = $1 ORDER BY n.at LIMIT $2 OFFSET $3)
SELECT page.*, (SELECT array_agg(x.name ORDER BY x.name) FROM trace_names x WHERE x.trace_id = page.id) AS names,
       m.transaction_id, m.key_id,
       CASE WHEN sum(octet_length(m.payload)) OVER (ORDER BY page.named_at, page.id) <= $4 THEN m.payload END AS payload
  FROM page LEFT JOIN messages m ON m.partition_id = page.partition_id AND m.seq = page.seq
 ORDER BY page.named_at, page.id;
