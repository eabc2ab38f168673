-- queue_seek: move a group in the given partitions to p_to: end, beginning, or time (after p_moment).
-- Leases and attempts of the group there are dropped. Answers how many cursors are there now, and where the last one is.
-- Cursors that are there already (and do not rest beside messages) are left alone, and their partitions unlocked: seeking
-- twice costs reads only.
CREATE FUNCTION queue_seek(p_group int, p_partitions bigint[], p_to text, p_moment timestamptz, OUT moved bigint, OUT last bigint)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  g groups; ids bigint[]; t timestamptz; delta bigint; later boolean := p_to = 'time' AND p_moment > clock_timestamp();
BEGIN
  SELECT * INTO g FROM groups x WHERE x.id = p_group;
  IF NOT FOUND THEN moved := 0; RETURN; END IF;
  SELECT array_agg(p.id ORDER BY p.id) INTO ids
    FROM partitions p
    LEFT JOIN LATERAL (SELECT * FROM cursors x WHERE x.partition_id = p.id AND x.group_id = p_group
                        ORDER BY x.version DESC LIMIT 1) c ON true
   WHERE p.id = ANY (p_partitions) AND p.queue_id = g.queue_id
     AND (later OR c.version IS NULL OR c.start_at IS NOT NULL OR c.failing OR NOT isempty(c.leased) OR NOT isempty(c.settled)
          OR c.position <> queue_seek_position(p, p_to, p_moment)
          OR c.due_at IS NULL AND EXISTS (SELECT 1 FROM messages m WHERE m.partition_id = p.id AND m.seq > c.position));

  IF ids IS NOT NULL THEN
    PERFORM 1 FROM partitions p WHERE p.id = ANY (ids) ORDER BY p.id FOR NO KEY UPDATE;
    SELECT * INTO g FROM groups x WHERE x.id = p_group FOR NO KEY UPDATE;
    IF NOT FOUND THEN moved := 0; RETURN; END IF;
    PERFORM queue_cursors(g, ids, g.start_at);
    PERFORM queue_lock_cursor(i, p_group) FROM unnest(ids) i;
    t := clock_timestamp();
    DELETE FROM leases l WHERE l.partition_id = ANY (ids) AND l.group_id = p_group AND l.queue_id > 0;
    DELETE FROM attempts a WHERE a.partition_id = ANY (ids) AND a.group_id = p_group;
    -- Nobody pushes to these partitions meanwhile, so a cursor at the end may rest.
    WITH sought AS MATERIALIZED (
      SELECT c.partition_id, c.version, queue_settled_count(c) AS was,
             CASE WHEN later THEN -1 ELSE queue_seek_position(p, p_to, p_moment) END AS target,
             (SELECT m.seq FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq DESC LIMIT 1) AS head
        FROM partitions p
        JOIN LATERAL (SELECT * FROM cursors x WHERE x.partition_id = p.id AND x.group_id = p_group
                       ORDER BY x.version DESC LIMIT 1) c ON true
       WHERE p.id = ANY (ids)
    ), kept AS (
      UPDATE cursors c SET version = c.version + 1, position = sought.target, settled = '{}', leased = '{}', next_expiry = NULL,
             failing = false, start_at = CASE WHEN later THEN p_moment END,
             due_at = CASE WHEN later THEN p_moment WHEN sought.head > sought.target THEN t END
        FROM sought
       WHERE c.partition_id = sought.partition_id AND c.group_id = p_group AND c.version = sought.version
      RETURNING queue_settled_count(c) - sought.was AS delta
    )
    SELECT sum(kept.delta) INTO delta FROM kept;
    IF delta <> 0 THEN
      INSERT INTO tally_log (queue_id, group_id, consumed) VALUES (g.queue_id, p_group, delta);
    END IF;
  END IF;
  SELECT count(*), (array_agg(c.position ORDER BY p.id DESC))[1] INTO moved, last
    FROM partitions p
    JOIN LATERAL (SELECT * FROM cursors x WHERE x.partition_id = p.id AND x.group_id = p_group
                   ORDER BY x.version DESC LIMIT 1) c ON true
   WHERE p.id = ANY (p_partitions) AND p.queue_id = g.queue_id;
END $$;
