-- queue_purge: one step of removing what deleted queues left behind. Answers the rows deleted; 0 = nothing is left.
CREATE FUNCTION queue_purge(p_limit int) RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  q int; n bigint; ids bigint[];
BEGIN
  SELECT id INTO q FROM queues WHERE deleted_at IS NOT NULL ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED;
  IF NOT FOUND THEN RETURN 0; END IF;
  DELETE FROM messages m USING (
    SELECT x.partition_id, x.seq FROM messages x WHERE x.queue_id = q LIMIT p_limit) v
   WHERE m.partition_id = v.partition_id AND m.seq = v.seq;
  GET DIAGNOSTICS n = ROW_COUNT;
  IF n > 0 THEN RETURN n; END IF;
  DELETE FROM scheduled_messages s WHERE s.ctid = ANY (ARRAY(
    SELECT x.ctid FROM scheduled_messages x WHERE x.queue_id = q LIMIT p_limit FOR UPDATE SKIP LOCKED));
  GET DIAGNOSTICS n = ROW_COUNT;
  IF n > 0 THEN RETURN n; END IF;
  DELETE FROM dead_letters d WHERE d.id IN (SELECT x.id FROM dead_letters x WHERE x.queue_id = q LIMIT p_limit);
  GET DIAGNOSTICS n = ROW_COUNT;
  IF n > 0 THEN RETURN n; END IF;
  DELETE FROM traces t WHERE t.id IN (SELECT x.id FROM traces x WHERE x.queue_id = q LIMIT p_limit);
  GET DIAGNOSTICS n = ROW_COUNT;
  IF n > 0 THEN RETURN n; END IF;
  SELECT array_agg(v.id) INTO ids FROM (SELECT p.id FROM partitions p WHERE p.queue_id = q ORDER BY p.id LIMIT p_limit) v;
  IF ids IS NOT NULL THEN
    DELETE FROM cursors c WHERE c.partition_id = ANY (ids);
    DELETE FROM leases l WHERE l.partition_id = ANY (ids) AND l.queue_id > 0;
    DELETE FROM attempts a WHERE a.partition_id = ANY (ids);
    DELETE FROM stream_state s WHERE s.partition_id = ANY (ids);
    DELETE FROM partitions p WHERE p.id = ANY (ids);
    RETURN cardinality(ids);
  END IF;
  DELETE FROM dropped_groups x WHERE x.queue_id = q;
  DELETE FROM tallies t WHERE t.queue_id = q;
  DELETE FROM tally_log t WHERE t.queue_id = q;
  DELETE FROM letter_log t WHERE t.queue_id = q;
  DELETE FROM groups g WHERE g.queue_id = q;
  DELETE FROM queues x WHERE x.id = q;
  RETURN 1;
END $$;
