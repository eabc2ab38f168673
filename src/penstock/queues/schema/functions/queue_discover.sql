-- queue_discover: give a group cursors for the next partitions (by id) that existed before it did. One call at a time per
-- group; answers the group as it is now, or nothing when another call is at it.
CREATE FUNCTION queue_discover(p_group int, p_step int) RETURNS SETOF groups LANGUAGE plpgsql AS $$
DECLARE
  g groups; reached bigint; t timestamptz;
BEGIN
  SELECT * INTO g FROM groups WHERE id = p_group FOR NO KEY UPDATE SKIP LOCKED;
  IF NOT FOUND THEN RETURN; END IF;
  SELECT max(s.id) INTO reached FROM (
    SELECT p.id FROM partitions p WHERE p.queue_id = g.queue_id AND p.id > g.discovered AND p.id <= g.discover_to
     ORDER BY p.id LIMIT p_step) s;
  IF reached IS NULL THEN
    reached := g.discover_to;
  ELSE
    PERFORM queue_cursors(g, (SELECT array_agg(p.id ORDER BY p.id) FROM partitions p
      WHERE p.queue_id = g.queue_id AND p.id > g.discovered AND p.id <= reached), g.start_at);
  END IF;
  UPDATE groups SET discovered = reached WHERE id = g.id RETURNING * INTO g;
  RETURN NEXT g;
END $$;
