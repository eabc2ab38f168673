-- partition_messages: the newest messages of one partition, found in the order of its sequence.
-- $1 id of the partition, the others as in messages.sql
SELECT m.partition_id, m.seq, m.xid::text AS xid, m.transaction_id, m.trace_id, m.producer, m.created_at, m.key_id, m.headers,
       q.name AS queue, q.namespace, q.task, q.priority, p.name AS partition, view.*
  FROM (
  SELECT * FROM messages m WHERE m.partition_id = $1 AND m.created_at BETWEEN $4 AND $5
     AND m.seq BETWEEN queue_seq_at($1, $4) AND queue_seq_at($1, $5) AND m.seq < $9::bigint
     AND $8::text IS NOT NULL AND $10::bigint IS NOT NULL ORDER BY m.seq DESC LIMIT $6) m
  JOIN queues q ON q.id = m.queue_id AND ($2::text IS NULL OR q.namespace = $2) AND ($3::text IS NULL OR q.task = $3)
  JOIN partitions p ON p.id = m.partition_id
  CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE g.name <> $7) AS buses,
           count(*) FILTER (WHERE g.name <> $7 AND (c.position >= m.seq OR c.settled @> m.seq)) AS bus_done,
           bool_or(c.position >= m.seq OR c.settled @> m.seq) FILTER (WHERE g.name = $7) AS queue_done,
           bool_or(c.leased @> m.seq AND c.next_expiry > clock_timestamp()) FILTER (WHERE g.name = $7) AS queue_leased,
           bool_or(c.leased @> m.seq AND c.next_expiry > clock_timestamp()) AS any_leased,
           max(c.next_expiry) FILTER (WHERE c.leased @> m.seq) AS lease_expires_at,
           count(*) FILTER (WHERE g.name = $7) > 0 AS has_queue_mode,
           EXISTS (SELECT 1 FROM dead_letters d WHERE d.partition_id = m.partition_id AND d.seq = m.seq) AS dead
      FROM groups g LEFT JOIN LATERAL (SELECT * FROM cursors c WHERE c.partition_id = m.partition_id AND c.group_id = g.id
                                        ORDER BY c.version DESC LIMIT 1) c ON true
     WHERE g.queue_id = m.queue_id) view
 ORDER BY m.seq DESC;
