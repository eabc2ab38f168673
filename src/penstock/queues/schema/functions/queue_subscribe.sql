-- queue_subscribe: make sure a group exists and has decided where it starts. With a partition the decision is for that
-- partition alone and its cursor is made at once; without, it is for the whole queue and partitions that exist already
-- are discovered step by step. p_start: messages up to this moment are not for the group (NULL = from the beginning);
-- 'new' starts now. A decision made before stays. Answers the group's id, NULL when the queue or partition is gone.
CREATE FUNCTION queue_subscribe(
  p_queue int, p_name text, p_partition bigint, p_mode text, p_start timestamptz
) RETURNS int LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  g groups; start timestamptz;
BEGIN
  IF p_partition IS NOT NULL THEN
    PERFORM 1 FROM partitions WHERE id = p_partition AND queue_id = p_queue FOR NO KEY UPDATE;
    IF NOT FOUND THEN RETURN NULL; END IF;
  END IF;
  -- Waits for those who are creating partitions of the queue, and makes later ones wait and then see the group.
  PERFORM 1 FROM queues WHERE id = p_queue AND deleted_at IS NULL FOR UPDATE;
  IF NOT FOUND THEN RETURN NULL; END IF;
  INSERT INTO groups (queue_id, name) VALUES (p_queue, p_name) ON CONFLICT (queue_id, name) DO NOTHING;
  SELECT * INTO g FROM groups WHERE queue_id = p_queue AND name = p_name FOR NO KEY UPDATE;
  start := CASE WHEN p_mode = 'new' THEN clock_timestamp() ELSE p_start END;
  IF p_partition IS NULL THEN
    IF g.mode IS NULL THEN
      UPDATE groups SET mode = p_mode, start_at = start, discovered = 0,
             discover_to = coalesce((SELECT max(id) FROM partitions WHERE queue_id = p_queue), 0)
       WHERE id = g.id;
    END IF;
  ELSE
    PERFORM queue_cursors(g, ARRAY[p_partition], CASE WHEN g.mode IS NULL THEN start ELSE g.start_at END);
  END IF;
  RETURN g.id;
END $$;
