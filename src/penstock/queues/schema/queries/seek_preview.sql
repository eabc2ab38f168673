-- seek_preview: what a seek would do in these partitions: how many settled messages come again, how many open ones are skipped.
-- Sequence numbers stand for messages: those deleted from the middle of a partition are counted as well.
-- $1 id of the group, $2 ids of partitions, $3 'end', 'beginning' or 'time', $4 the time
SELECT count(*) AS partitions,
       coalesce(sum(greatest(0, greatest(c.position, below) - greatest(target, below)) + beyond_again), 0) AS again,
       coalesce(sum(greatest(0, least(target, head) - greatest(c.position, below)) - beyond_skipped), 0) AS skipped
  FROM partitions p
  JOIN LATERAL (SELECT * FROM cursors c WHERE c.partition_id = p.id AND c.group_id = $1
                 ORDER BY c.version DESC LIMIT 1) c ON true
  CROSS JOIN LATERAL (
    SELECT coalesce((SELECT m.seq FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq DESC LIMIT 1), p.floor) AS head,
           coalesce((SELECT m.seq - 1 FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq LIMIT 1), p.floor) AS below
  ) ends
  CROSS JOIN LATERAL (
    SELECT CASE $3::text WHEN 'end' THEN head WHEN 'beginning' THEN below ELSE queue_seq_at(p.id, $4) END AS target) goal
  CROSS JOIN LATERAL (
    SELECT coalesce(sum(greatest(0, upper(r) - greatest(lower(r), target + 1))), 0) AS beyond_again,
           coalesce(sum(greatest(0, least(upper(r) - 1, target) - lower(r) + 1)), 0) AS beyond_skipped
      FROM unnest(c.settled) r) beyond
 WHERE p.id = ANY ($2::bigint[]);
