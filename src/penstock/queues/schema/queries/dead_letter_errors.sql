-- dead_letter_errors: what the newest 1000 dead letters died of, the most frequent first.
-- $1 to $6 as in dead_letters.sql, $7 limit, $8 part of the error
WITH newest AS MATERIALIZED (
  SELECT d.partition_id, left(d.error, 500) AS error, d.failed_at
    FROM dead_letters d JOIN queues q ON q.id = d.queue_id AND q.deleted_at IS NULL
      JOIN partitions p ON p.id = d.partition_id
      LEFT JOIN groups g ON g.id = d.group_id
     WHERE ($1::text IS NULL OR q.name = $1) AND ($2::text IS NULL OR g.name = $2)
       AND ($3::text IS NULL OR p.name = $3) AND ($4::timestamptz IS NULL OR d.failed_at >= $4)
       AND ($5::timestamptz IS NULL OR d.failed_at <= $5) AND ($6::bigint IS NULL OR d.id = $6)
       AND ($8::text IS NULL OR strpos(lower(d.error), lower($8)) > 0)
     ORDER BY d.id DESC LIMIT 1000)
SELECT error, count(*) AS n, max(failed_at) AS last,
       (SELECT count(DISTINCT partition_id) FROM newest) AS partitions
  FROM newest GROUP BY 1 ORDER BY 2 DESC, 3 DESC LIMIT $7;
