-- Messages with this transaction id, looked for in the first $3 partitions of a queue. $1 queue (NULL = all), $2 transaction id,
-- $4 bytes from which on a payload is not read
SELECT q.name AS queue, m.partition_id, m.seq, m.xid::text AS xid, p.name AS partition, m.transaction_id, m.created_at, m.producer,
       m.key_id, octet_length(m.payload) AS size, CASE WHEN octet_length(m.payload) <= $4 THEN m.payload END AS payload
  FROM (SELECT p.id, p.name, p.queue_id FROM partitions p
         WHERE $1::text IS NULL OR p.queue_id = (SELECT id FROM queues WHERE name = $1 AND deleted_at IS NULL)
         ORDER BY p.queue_id, p.id LIMIT $3) p
  JOIN queues q ON q.id = p.queue_id AND q.deleted_at IS NULL
  JOIN messages m ON m.partition_id = p.id AND m.transaction_id = $2
   AND hashtextextended(m.transaction_id, 0) = hashtextextended($2, 0)
 ORDER BY m.created_at DESC LIMIT 100
