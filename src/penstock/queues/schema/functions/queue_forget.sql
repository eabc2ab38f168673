-- queue_forget: one step of removing what a deleted group left in the partitions. Answers how many cursors it removed, and
-- whether there is more to do (NULL when another call is at it).
CREATE FUNCTION queue_forget(p_group int, p_step int, OUT removed bigint, OUT more boolean) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  d dropped_groups; ids bigint[];
BEGIN
  removed := 0;
  SELECT * INTO d FROM dropped_groups x WHERE x.group_id = p_group FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN
    more := CASE WHEN NOT EXISTS (SELECT 1 FROM dropped_groups x WHERE x.group_id = p_group) THEN false END;
    RETURN;
  END IF;
  SELECT array_agg(v.id ORDER BY v.id) INTO ids FROM (
    SELECT p.id FROM partitions p WHERE p.queue_id = d.queue_id AND p.id > d.reached ORDER BY p.queue_id, p.id LIMIT p_step) v;
  more := ids IS NOT NULL;
  IF NOT more THEN
    DELETE FROM tallies t WHERE t.queue_id = d.queue_id AND t.group_id = p_group;
    DELETE FROM tally_log t WHERE t.queue_id = d.queue_id AND t.group_id = p_group;
    DELETE FROM letter_log t WHERE t.queue_id = d.queue_id AND t.group_id = p_group;
    DELETE FROM dropped_groups x WHERE x.group_id = p_group;
    RETURN;
  END IF;
  PERFORM queue_lock_cursor(i, p_group) FROM unnest(ids) i;
  DELETE FROM cursors c WHERE c.partition_id = ANY (ids) AND c.group_id = p_group;
  GET DIAGNOSTICS removed = ROW_COUNT;
  DELETE FROM leases l WHERE l.partition_id = ANY (ids) AND l.group_id = p_group AND l.queue_id > 0;
  DELETE FROM attempts a WHERE a.partition_id = ANY (ids) AND a.group_id = p_group;
  UPDATE dropped_groups x SET reached = ids[cardinality(ids)] WHERE x.group_id = p_group;
END $$;
