-- dead_letter_step: the next dead letters behind the id $8, $9 at most.
-- $1 to $7 as in dead_letter_count.sql
SELECT d.id, d.partition_id, d.group_id, d.seq, d.queue, d.group_name
  FROM dead_letters_matching($1, $2, $3, $4, $5, $6, $7) d WHERE d.id > $8 ORDER BY d.id LIMIT $9;
