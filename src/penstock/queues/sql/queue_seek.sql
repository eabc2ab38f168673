-- queue_seek: move a group in the given partitions to p_to: end, beginning, or time (after p_moment).
-- Leases and attempts of the group there are dropped. Answers how many cursors were moved, and where the last one is.
CREATE OR REPLACE FUNCTION queue_seek(p_group int, p_partitions bigint[], p_to text, p_moment timestamptz, OUT moved bigint, OUT last bigint)
LANGUAGE plpgsql AS $$
DECLARE
  id bigint; c cursors; q queues; g groups; was bigint; t timestamptz;
BEGIN
  moved := 0;
  PERFORM 1 FROM partitions p WHERE p.id = ANY (p_partitions) ORDER BY p.id FOR NO KEY UPDATE;
  SELECT * INTO g FROM groups x WHERE x.id = p_group FOR NO KEY UPDATE;
  IF NOT FOUND THEN RETURN; END IF;
  SELECT * INTO q FROM queues x WHERE x.id = g.queue_id;
  PERFORM queue_cursors(g, p_partitions, g.start_at);
  FOR id IN SELECT p.id FROM partitions p WHERE p.id = ANY (p_partitions) AND p.queue_id = g.queue_id ORDER BY p.id LOOP
    SELECT * INTO c FROM cursors x WHERE x.partition_id = id AND x.group_id = p_group ORDER BY x.version DESC LIMIT 1 FOR UPDATE;
    CONTINUE WHEN NOT FOUND;
    t := clock_timestamp();
    was := queue_settled_count(c);
    DELETE FROM leases l WHERE l.partition_id = id AND l.group_id = p_group;
    DELETE FROM attempts a WHERE a.partition_id = id AND a.group_id = p_group;
    c.leased := '{}'; c.settled := '{}'; c.next_expiry := NULL; c.failing := false; c.start_at := NULL;
    IF p_to = 'time' AND p_moment > t THEN
      c.position := -1; c.start_at := p_moment; c.due_at := p_moment;
    ELSE
      c.position := queue_seq_at(id, CASE p_to WHEN 'end' THEN 'infinity' WHEN 'beginning' THEN '-infinity' ELSE p_moment END);
      c.due_at := queue_next(c, q);
    END IF;
    PERFORM queue_keep(c);
    INSERT INTO tally_log (queue_id, group_id, consumed) VALUES (c.queue_id, p_group, queue_settled_count(c) - was);
    moved := moved + 1;
    last := c.position;
  END LOOP;
END $$;
