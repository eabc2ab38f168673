-- queue_evict: delete messages created at or before p_before that some group has not settled (maxWaitTimeSeconds), of the
-- given partitions. Answers how many were deleted.
CREATE FUNCTION queue_evict(p_queue int, p_partitions bigint[], p_before timestamptz) RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  ids bigint[]; lows bigint[]; uptos bigint[];
BEGIN
  SELECT array_agg(v.partition_id ORDER BY v.partition_id), array_agg(v.low ORDER BY v.partition_id),
         array_agg(queue_seq_at(v.partition_id, p_before) ORDER BY v.partition_id)
    INTO ids, lows, uptos
    FROM (SELECT p.id AS partition_id, min(greatest(c.position, 0)) + 1 AS low
            FROM unnest(p_partitions) p (id)
            JOIN groups g ON g.queue_id = p_queue
           CROSS JOIN LATERAL (SELECT x.position, x.due_at FROM cursors x WHERE x.partition_id = p.id AND x.group_id = g.id
                                ORDER BY x.version DESC LIMIT 1) c
           WHERE c.due_at IS NOT NULL GROUP BY 1) v;
  IF ids IS NULL THEN RETURN 0; END IF;
  RETURN queue_remove(ids, lows, uptos, false);
END $$;
