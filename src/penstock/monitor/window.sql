-- A window of a queue's messages with their payloads, the newest first, for a search in payloads.
-- $1 queue, $2 partition (NULL = all), $3 from, $4 to (NULL = open), $5, $6, $7 xid, seq and partition of the last one seen,
-- $8 limit, $9 bytes from which on a payload is not looked at
SELECT $1::text AS queue, m.partition_id, m.seq, m.xid::text AS xid, p.name AS partition, m.transaction_id, m.created_at, m.producer, m.key_id,
       octet_length(m.payload) AS size, CASE WHEN octet_length(m.payload) <= $9 THEN m.payload END AS payload
  FROM (SELECT * FROM messages m
         WHERE m.queue_id = (SELECT id FROM queues WHERE name = $1 AND deleted_at IS NULL)
           AND ($2::bigint IS NULL OR m.partition_id = $2)
           AND ($3::timestamptz IS NULL OR m.created_at >= $3) AND ($4::timestamptz IS NULL OR m.created_at <= $4)
           AND m.xid <= $5::text::xid8 AND (m.xid, m.seq, m.partition_id) < ($5::text::xid8, $6::bigint, $7::bigint)
         ORDER BY m.xid DESC, m.seq DESC, m.partition_id DESC LIMIT $8) m
  JOIN partitions p ON p.id = m.partition_id
 ORDER BY m.xid DESC, m.seq DESC, m.partition_id DESC
