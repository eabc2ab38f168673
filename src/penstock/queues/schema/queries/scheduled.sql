-- scheduled: messages for later, the next due first.
-- $1 queue, $2 partition (NULL = all), $3 limit, $4, $5 due time and id of the last one of the page before
SELECT s.due_at, s.id, s.partition_id, s.pushed_at, s.transaction_id, s.trace_id, s.producer, s.key_id, s.headers,
       q.name AS queue, p.name AS partition
  FROM (SELECT s.* FROM scheduled_messages s
         WHERE (s.due_at, s.id) > ($4::timestamptz, $5::bigint)
           AND ($1::text IS NULL OR s.queue_id = (SELECT q.id FROM queues q WHERE q.name = $1 AND q.deleted_at IS NULL))
           AND ($2::text IS NULL OR s.partition_id IN (SELECT p.id FROM partitions p JOIN queues q ON q.id = p.queue_id
                 WHERE p.name = $2 AND q.deleted_at IS NULL AND ($1 IS NULL OR q.name = $1)))
         ORDER BY s.due_at, s.id LIMIT $3) s
  JOIN queues q ON q.id = s.queue_id AND q.deleted_at IS NULL
  JOIN partitions p ON p.id = s.partition_id
 ORDER BY s.due_at, s.id;
