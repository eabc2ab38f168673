-- queue_mirror: show how far a reader outside the broker (a Spark query) has come, as the cursors of a group: everything
-- stored by transactions before p_to is settled. Looks at partitions that got messages from transaction p_from on, or at
-- all of them when that is NULL; those after partition p_after, at most p_step in one call. Never moves a cursor back.
-- Answers the last partition looked at, NULL when there was none left, -1 when there is no such group (see
-- queue_subscribe).
CREATE FUNCTION queue_mirror(p_queue text, p_group text, p_from xid8, p_to xid8, p_after bigint, p_step int)
RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  q queues; g groups; c cursors; ids bigint[]; id bigint; head bigint; was bigint;
BEGIN
  SELECT * INTO q FROM queues x WHERE x.name = p_queue AND x.deleted_at IS NULL;
  SELECT * INTO g FROM groups x WHERE x.queue_id = q.id AND x.name = p_group;
  IF NOT FOUND THEN RETURN -1; END IF;
  IF p_from IS NULL THEN
    SELECT array_agg(s.id ORDER BY s.id) INTO ids FROM (
      SELECT p.id FROM partitions p WHERE p.queue_id = q.id AND p.id > p_after ORDER BY p.id LIMIT p_step) s;
  ELSE
    SELECT array_agg(s.partition_id ORDER BY s.partition_id) INTO ids FROM (
      SELECT DISTINCT m.partition_id FROM messages m
       WHERE m.queue_id = q.id AND m.xid >= p_from AND m.xid < p_to AND m.partition_id > p_after
       ORDER BY m.partition_id LIMIT p_step) s;
  END IF;
  IF ids IS NULL THEN RETURN NULL; END IF;
  PERFORM 1 FROM partitions p WHERE p.id = ANY (ids) ORDER BY p.id FOR NO KEY UPDATE;
  SELECT * INTO g FROM groups x WHERE x.id = g.id FOR NO KEY UPDATE;
  IF NOT FOUND THEN RETURN -1; END IF;  -- deleted meanwhile
  PERFORM queue_cursors(g, ids, g.start_at);
  FOREACH id IN ARRAY ids LOOP
    SELECT m.seq INTO head FROM messages m WHERE m.partition_id = id AND m.xid < p_to ORDER BY m.seq DESC LIMIT 1;
    CONTINUE WHEN NOT FOUND;
    SELECT * INTO c FROM cursors x WHERE x.partition_id = id AND x.group_id = g.id ORDER BY x.version DESC LIMIT 1 FOR UPDATE;
    CONTINUE WHEN NOT FOUND OR c.position >= head;
    was := queue_settled_count(c);
    c.consumed := c.consumed + head - greatest(c.position, 0);
    c.position := head; c.start_at := NULL; c.consumed_at := clock_timestamp();
    c.due_at := queue_next(c, q);
    PERFORM queue_keep(c);
    INSERT INTO tally_log (queue_id, group_id, consumed, done)
    SELECT q.id, g.id, n, n FROM (SELECT queue_settled_count(c) - was AS n) x WHERE n > 0;
  END LOOP;
  RETURN ids[array_upper(ids, 1)];
END $$;
