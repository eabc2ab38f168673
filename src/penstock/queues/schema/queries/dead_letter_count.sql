-- dead_letter_count: how many dead letters match, exact up to 100,000.
-- $1 to $6 as in dead_letters.sql, $7 part of the error
SELECT count(*) FROM (
  SELECT 1
    FROM dead_letters d JOIN queues q ON q.id = d.queue_id AND q.deleted_at IS NULL
      JOIN partitions p ON p.id = d.partition_id
      LEFT JOIN groups g ON g.id = d.group_id
     WHERE ($1::text IS NULL OR q.name = $1) AND ($2::text IS NULL OR g.name = $2)
       AND ($3::text IS NULL OR p.name = $3) AND ($4::timestamptz IS NULL OR d.failed_at >= $4)
       AND ($5::timestamptz IS NULL OR d.failed_at <= $5) AND ($6::bigint IS NULL OR d.id = $6)
       AND ($7::text IS NULL OR strpos(lower(d.error), lower($7)) > 0)
     LIMIT 100000) x;
