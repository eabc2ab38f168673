-- messages: the newest messages of the chosen queues, found in the order of transactions between those of the two
-- moments: neither what is outside the time asked for is looked at, nor what a page before has shown.
-- $1 queue, $2 namespace, $3 task (NULL = all), $4 from, $5 to, $6 limit, $7 the group of queue mode,
-- $8, $9, $10 xid, seq and partition of the last one of the page before
SELECT m.partition_id, m.seq, m.xid::text AS xid, m.transaction_id, m.trace_id, m.producer, m.created_at, m.key_id, m.headers,
       q.name AS queue, q.namespace, q.task, q.priority, p.name AS partition, view.*
  FROM (
  SELECT m.* FROM (SELECT q.id FROM queues q WHERE q.deleted_at IS NULL AND ($1::text IS NULL OR q.name = $1)
           AND ($2::text IS NULL OR q.namespace = $2) AND ($3::text IS NULL OR q.task = $3)) chosen
  CROSS JOIN LATERAL (
    SELECT * FROM messages m WHERE m.queue_id = chosen.id AND m.created_at BETWEEN $4 AND $5
       AND m.xid >= queue_xid_at(chosen.id, $4::timestamptz - interval '1 minute')
       AND m.xid <= queue_xid_at(chosen.id, $5::timestamptz + interval '1 minute')
       AND m.xid <= $8::text::xid8 AND (m.xid, m.seq, m.partition_id) < ($8::text::xid8, $9::bigint, $10::bigint)
     ORDER BY m.xid DESC, m.seq DESC, m.partition_id DESC LIMIT $6) m
   ORDER BY m.xid DESC, m.seq DESC, m.partition_id DESC LIMIT $6) m
  JOIN queues q ON q.id = m.queue_id AND ($2::text IS NULL OR q.namespace = $2) AND ($3::text IS NULL OR q.task = $3)
  JOIN partitions p ON p.id = m.partition_id
  CROSS JOIN LATERAL message_progress(m.queue_id, m.partition_id, m.seq, $7) view
 ORDER BY m.xid DESC, m.seq DESC, m.partition_id DESC;
