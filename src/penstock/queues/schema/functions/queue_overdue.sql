-- queue_overdue: the partitions of a queue, at most p_limit, where a message created at or before p_before is not settled by
-- some group. Looks at every partition where a group has something to do, but only if the queue's oldest message is so old.
CREATE FUNCTION queue_overdue(p_queue int, p_before timestamptz, p_limit int) RETURNS SETOF bigint
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
BEGIN
  -- In the order of transactions times may be off by as long as a transaction took.
  IF NOT EXISTS (SELECT 1 FROM (SELECT m.created_at FROM messages m WHERE m.queue_id = p_queue ORDER BY m.xid LIMIT 1) oldest
                  WHERE oldest.created_at <= p_before + interval '1 minute') THEN
    RETURN;
  END IF;
  RETURN QUERY
    SELECT DISTINCT c.partition_id
      FROM groups g JOIN cursors c ON c.group_id = g.id AND c.due_at IS NOT NULL
     CROSS JOIN LATERAL (SELECT m.created_at FROM messages m WHERE m.partition_id = c.partition_id
                            AND m.seq > c.position ORDER BY m.seq LIMIT 1) oldest
     WHERE g.queue_id = p_queue AND oldest.created_at <= p_before
     LIMIT p_limit;
END $$;
