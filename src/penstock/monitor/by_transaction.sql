-- Messages of a queue with this transaction id, looked for in its first $3 partitions. $1 queue, $2 transaction id
SELECT m.partition_id, m.seq, m.xid::text AS xid, p.name AS partition, m.transaction_id, m.created_at, m.producer, m.key_id,
       octet_length(m.payload) AS size
  FROM (SELECT p.id, p.name FROM partitions p
         WHERE p.queue_id = (SELECT id FROM queues WHERE name = $1 AND deleted_at IS NULL)
         ORDER BY p.queue_id, p.id LIMIT $3) p
  JOIN messages m ON m.partition_id = p.id AND m.transaction_id = $2
   AND hashtextextended(m.transaction_id, 0) = hashtextextended($2, 0)
 ORDER BY m.created_at DESC LIMIT 100
