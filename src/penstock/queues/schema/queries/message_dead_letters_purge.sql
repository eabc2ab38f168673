-- message_dead_letters_purge: delete the dead letters of a message; their groups will never complete it.
-- $1 id of the partition, $2 seq
WITH gone AS (
  DELETE FROM dead_letters WHERE partition_id = $1 AND seq = $2 RETURNING group_id
)
INSERT INTO tally_log (queue_id, group_id, removed)
SELECT g.queue_id, g.id, count(*) FROM gone JOIN groups g ON g.id = gone.group_id GROUP BY 1, 2;
