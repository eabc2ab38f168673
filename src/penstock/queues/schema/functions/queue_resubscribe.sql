-- queue_resubscribe: groups of this name start at p_start in partitions they have not met yet. A group that has only
-- taken from single partitions so far decides with this for the whole queue. Answers how many groups there are.
CREATE FUNCTION queue_resubscribe(p_name text, p_start timestamptz) RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  n bigint;
BEGIN
  -- As in queue_subscribe: whoever is creating a partition ends first, or waits and then sees what the group decided.
  PERFORM 1 FROM queues q WHERE q.id IN (SELECT g.queue_id FROM groups g WHERE g.name = p_name)
   ORDER BY q.id FOR UPDATE;
  UPDATE groups g SET mode = 'timestamp', start_at = p_start,
         discover_to = CASE WHEN g.mode IS NULL
           THEN coalesce((SELECT max(p.id) FROM partitions p WHERE p.queue_id = g.queue_id), 0) ELSE g.discover_to END
   WHERE g.name = p_name;
  GET DIAGNOSTICS n = ROW_COUNT;
  RETURN n;
END $$;
