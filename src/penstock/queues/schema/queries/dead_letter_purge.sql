-- dead_letter_purge: delete the oldest dead letters that match, $8 at most; how many.
-- $1 to $7 as in dead_letter_count.sql. Their groups will never complete them: they count as dropped.
WITH gone AS (
  DELETE FROM dead_letters WHERE id IN (
    SELECT d.id FROM dead_letters_matching($1, $2, $3, $4, $5, $6, $7) d ORDER BY d.id LIMIT $8)
  RETURNING queue_id, group_id
), dropped AS (
  INSERT INTO tally_log (queue_id, group_id, removed)
  SELECT g.queue_id, g.id, count(*) FROM gone JOIN groups g ON g.id = gone.group_id GROUP BY 1, 2
)
SELECT count(*) FROM gone;
