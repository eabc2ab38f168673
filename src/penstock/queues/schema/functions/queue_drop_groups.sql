-- queue_drop_groups: delete the groups of this name (of one queue, or of all). With p_keep their subscriptions stay, under a
-- new number, as do their dead letters: every partition is discovered anew. Answers the numbers of the deleted ones; queue_forget removes what they
-- left in the partitions.
CREATE FUNCTION queue_drop_groups(p_name text, p_queue text, p_keep boolean) RETURNS int[] LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  g groups; anew int; ids int[] := '{}'; queue_ids int[];
BEGIN
  SELECT array_agg(x.id) INTO queue_ids FROM (
    SELECT q.id FROM queues q
     WHERE (p_queue IS NULL OR q.name = p_queue) AND q.deleted_at IS NULL
       AND EXISTS (SELECT 1 FROM groups y WHERE y.queue_id = q.id AND y.name = p_name)
     ORDER BY q.id FOR UPDATE) x;  -- nobody creates partitions meanwhile: they would give the group cursors
  FOR g IN DELETE FROM groups y WHERE y.queue_id = ANY (queue_ids) AND y.name = p_name RETURNING y.* LOOP
    ids := ids || g.id;
    INSERT INTO dropped_groups (group_id, queue_id) VALUES (g.id, g.queue_id);
    IF p_keep THEN
      INSERT INTO groups (queue_id, name, created_at, mode, start_at, discover_to)
      VALUES (g.queue_id, g.name, g.created_at, g.mode, g.start_at,
              coalesce((SELECT max(p.id) FROM partitions p WHERE p.queue_id = g.queue_id), 0))
      RETURNING id INTO anew;
      UPDATE dead_letters d SET group_id = anew WHERE d.queue_id = g.queue_id AND d.group_id = g.id;
    END IF;
  END LOOP;
  RETURN ids;
END $$;
