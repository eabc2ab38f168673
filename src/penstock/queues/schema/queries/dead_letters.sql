-- dead_letters: dead letters, the newest first; a payload is left out once those before it have $9 bytes.
-- $1 queue, $2 group, $3 partition, $4 from, $5 to, $6 id (NULL = all), $7 limit, $8 offset,
-- $10 only those older than this id (NULL = all), $11 part of the error (NULL = all)
WITH page AS MATERIALIZED (
  SELECT d.id, octet_length(d.payload) AS size, q.name AS queue, p.name AS partition, g.name AS group_name
    FROM dead_letters d JOIN queues q ON q.id = d.queue_id AND q.deleted_at IS NULL
      JOIN partitions p ON p.id = d.partition_id
      LEFT JOIN groups g ON g.id = d.group_id
     WHERE ($1::text IS NULL OR q.name = $1) AND ($2::text IS NULL OR g.name = $2)
       AND ($3::text IS NULL OR p.name = $3) AND ($4::timestamptz IS NULL OR d.failed_at >= $4)
       AND ($5::timestamptz IS NULL OR d.failed_at <= $5) AND ($6::bigint IS NULL OR d.id = $6)
       AND ($11::text IS NULL OR strpos(lower(d.error), lower($11)) > 0)
       AND ($10::bigint IS NULL OR d.id < $10)
     ORDER BY d.id DESC LIMIT $7 OFFSET $8)
SELECT d.id, d.partition_id, d.seq, d.failed_at, d.attempts, d.error, d.created_at, d.transaction_id,
       d.trace_id, d.producer, d.key_id, d.headers, page.queue, page.partition, page.group_name,
       page.upto > $9 AS omitted, CASE WHEN page.upto > $9 THEN 'null' ELSE d.payload END AS payload
  FROM (SELECT *, sum(size) OVER (ORDER BY id DESC) - size AS upto FROM page) page
  JOIN dead_letters d USING (id)
 ORDER BY d.id DESC;
