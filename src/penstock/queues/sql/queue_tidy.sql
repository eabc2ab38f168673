-- queue_tidy: remove empty partitions without activity since p_before, up to p_limit with ids above p_after. A partition
-- is idle when it has no message and was created, and emptied, long ago. Answers the last id looked at, NULL at the end.
CREATE OR REPLACE FUNCTION queue_tidy(p_before timestamptz, p_after bigint, p_limit int) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  ids bigint[]; reached bigint;
BEGIN
  SELECT max(v.id), array_agg(v.id ORDER BY v.id) FILTER (WHERE v.created_at < p_before
           AND NOT EXISTS (SELECT 1 FROM messages m WHERE m.partition_id = v.id)
           AND NOT EXISTS (SELECT 1 FROM dead_letters d WHERE d.partition_id = v.id)
           AND NOT EXISTS (SELECT 1 FROM cursors c WHERE c.partition_id = v.id AND (c.consumed_at >= p_before OR c.due_at IS NOT NULL)))
    INTO reached, ids
    FROM (SELECT * FROM partitions p WHERE p.id > p_after ORDER BY p.id LIMIT p_limit) v;
  IF ids IS NOT NULL THEN
    SELECT array_agg(v.id) INTO ids FROM (SELECT p.id FROM partitions p WHERE p.id = ANY (ids) ORDER BY p.id FOR UPDATE SKIP LOCKED) v;
    SELECT array_agg(i) INTO ids FROM unnest(ids) i WHERE NOT EXISTS (SELECT 1 FROM messages m WHERE m.partition_id = i);
    DELETE FROM cursors c WHERE c.partition_id = ANY (ids);
    DELETE FROM leases l WHERE l.partition_id = ANY (ids);
    DELETE FROM attempts a WHERE a.partition_id = ANY (ids);
    DELETE FROM partitions p WHERE p.id = ANY (ids);
  END IF;
  RETURN reached;
END $$;
