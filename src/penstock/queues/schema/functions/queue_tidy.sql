-- queue_tidy: remove partitions that have been empty and without activity since p_before, unless a stream has state there.
-- Looks at up to p_limit of those that may have been empty so long; answers how many it looked at, 0 = none are left.
CREATE FUNCTION queue_tidy(p_before timestamptz, p_limit int) RETURNS int LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  ids bigint[]; used bigint[]; idle bigint[];
BEGIN
  SELECT array_agg(v.id) INTO ids FROM (
    SELECT p.id FROM partitions p WHERE p.emptied_at < p_before ORDER BY p.emptied_at LIMIT p_limit) v;
  SELECT array_agg(v.id) INTO ids FROM (
    SELECT p.id FROM partitions p WHERE p.id = ANY (ids) AND p.emptied_at < p_before ORDER BY p.id FOR UPDATE SKIP LOCKED) v;
  IF ids IS NULL THEN RETURN 0; END IF;
  WITH kept AS (
    UPDATE partitions p
       SET emptied_at = CASE WHEN NOT EXISTS (SELECT 1 FROM messages m WHERE m.partition_id = p.id) THEN clock_timestamp() END
     WHERE p.id = ANY (ids) AND (
           EXISTS (SELECT 1 FROM messages m WHERE m.partition_id = p.id)
        OR EXISTS (SELECT 1 FROM dead_letters d WHERE d.partition_id = p.id)
        OR EXISTS (SELECT 1 FROM stream_state s WHERE s.partition_id = p.id)
        OR EXISTS (SELECT 1 FROM cursors c WHERE c.partition_id = p.id AND (c.consumed_at >= p_before OR c.due_at IS NOT NULL)))
    RETURNING p.id)
  SELECT array_agg(kept.id) INTO used FROM kept;
  SELECT array_agg(i) INTO idle FROM unnest(ids) i WHERE i <> ALL (coalesce(used, '{}'));
  IF idle IS NOT NULL THEN
    DELETE FROM cursors c WHERE c.partition_id = ANY (idle);
    DELETE FROM leases l WHERE l.partition_id = ANY (idle) AND l.queue_id > 0;
    DELETE FROM attempts a WHERE a.partition_id = ANY (idle);
    DELETE FROM partitions p WHERE p.id = ANY (idle);
  END IF;
  RETURN cardinality(ids);
END $$;
