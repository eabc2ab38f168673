-- dead_letter_errors: what the newest 1000 dead letters died of, the most frequent first.
-- $1 to $7 as in dead_letter_count.sql, $8 limit
WITH newest AS MATERIALIZED (
  SELECT d.partition_id, left(d.error, 500) AS error, d.failed_at
    FROM dead_letters_matching($1, $2, $3, $4, $5, $6, $7) d ORDER BY d.id DESC LIMIT 1000)
SELECT error, count(*) AS count, max(failed_at) AS last_seen,
       (SELECT count(DISTINCT partition_id) FROM newest) AS partitions
  FROM newest GROUP BY 1 ORDER BY 2 DESC, 3 DESC LIMIT $8;
