-- queue_evict: delete messages created at or before p_before that some group has not settled (maxWaitTimeSeconds). Looks
-- only at partitions where a group has something to do; up to p_limit of them per call. Answers how many were deleted.
CREATE OR REPLACE FUNCTION queue_evict(p_queue int, p_before timestamptz, p_limit int) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  ids bigint[]; lows bigint[]; uptos bigint[];
BEGIN
  SELECT array_agg(v.partition_id ORDER BY v.partition_id), array_agg(v.low ORDER BY v.partition_id),
         array_agg(queue_seq_at(v.partition_id, p_before) ORDER BY v.partition_id)
    INTO ids, lows, uptos
    FROM (SELECT c.partition_id, min(greatest(c.position, 0)) + 1 AS low
            FROM groups g JOIN cursors c ON c.group_id = g.id AND c.due_at IS NOT NULL
           CROSS JOIN LATERAL (SELECT m.created_at FROM messages m WHERE m.partition_id = c.partition_id
                                  AND m.seq > c.position ORDER BY m.seq LIMIT 1) oldest
           WHERE g.queue_id = p_queue AND oldest.created_at <= p_before
           GROUP BY 1 LIMIT p_limit) v;
  IF ids IS NULL THEN RETURN 0; END IF;
  RETURN queue_remove(ids, lows, uptos, false);
END $$;
