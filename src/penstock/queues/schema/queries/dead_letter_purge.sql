-- dead_letter_purge: delete the oldest dead letters that match, $7 at most.
-- $1 to $6 as in dead_letters.sql, $8 part of the error. Their groups will never complete them: they count as dropped. Answers how many.
WITH gone AS (
DELETE FROM dead_letters WHERE id IN (
  SELECT d.id
    FROM dead_letters d JOIN queues q ON q.id = d.queue_id AND q.deleted_at IS NULL
      JOIN partitions p ON p.id = d.partition_id
      LEFT JOIN groups g ON g.id = d.group_id
     WHERE ($1::text IS NULL OR q.name = $1) AND ($2::text IS NULL OR g.name = $2)
       AND ($3::text IS NULL OR p.name = $3) AND ($4::timestamptz IS NULL OR d.failed_at >= $4)
       AND ($5::timestamptz IS NULL OR d.failed_at <= $5) AND ($6::bigint IS NULL OR d.id = $6)
       AND ($8::text IS NULL OR strpos(lower(d.error), lower($8)) > 0)
     ORDER BY d.id LIMIT $7) RETURNING queue_id, group_id
), dropped AS (
  INSERT INTO tally_log (queue_id, group_id, removed)
  SELECT g.queue_id, g.id, count(*) FROM gone JOIN groups g ON g.id = gone.group_id GROUP BY 1, 2
)
SELECT count(*) FROM gone;
