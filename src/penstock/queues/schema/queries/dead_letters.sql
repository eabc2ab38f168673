-- dead_letters: dead letters, the newest first; a payload is left out once those before it have $10 bytes.
-- $1 to $7 as in dead_letter_count.sql, $8 limit, $9 offset, $11 only those older than this id (NULL = all)
WITH page AS MATERIALIZED (
  SELECT d.id, d.size, d.queue, d.partition, d.group_name FROM dead_letters_matching($1, $2, $3, $4, $5, $6, $7) d
   WHERE $11::bigint IS NULL OR d.id < $11 ORDER BY d.id DESC LIMIT $8 OFFSET $9)
SELECT d.id AS number, d.partition_id, d.seq, d.failed_at, d.attempts, d.error, d.created_at, d.transaction_id,
       d.producer, d.key_id, d.headers, page.queue, page.partition, page.group_name AS group,
       CASE WHEN page.upto <= $10 THEN d.payload END AS payload
  FROM (SELECT *, sum(size) OVER (ORDER BY id DESC) - size AS upto FROM page) page
  JOIN dead_letters d USING (id)
 ORDER BY d.id DESC;
