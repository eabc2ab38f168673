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
  CROSS JOIN LATERAL message_progress(m.queue_id, m.partition_id, m.seq, $7) view
 ORDER BY m.seq DESC;
