-- queue_remove: delete stored messages, one range [from, upto] per partition (no partition twice). With p_settled only the
-- part that every group has settled, from the front. Keeps counters exact, cursors and leases in step, and the last used
-- sequence number known. Answers how many were deleted. Its advisory lock shows queue_cursors that messages are being deleted.
CREATE FUNCTION queue_remove(p_partitions bigint[], p_from bigint[], p_upto bigint[], p_settled boolean)
RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  w record; c cursors; q queues; total bigint; gone int8multirange; settled_groups int[]; settled bigint[];
  ids bigint[]; queue_ids int[]; lows bigint[]; uptos bigint[]; firsts bigint[]; lasts bigint[]; counts bigint[];
BEGIN
  PERFORM pg_advisory_xact_lock(queue_lock_key('queue_remove.' || x.queue_id))
     FROM (SELECT DISTINCT p.queue_id FROM partitions p WHERE p.id = ANY (p_partitions) ORDER BY 1) x;
  PERFORM 1 FROM partitions p WHERE p.id = ANY (p_partitions) ORDER BY p.id FOR NO KEY UPDATE;
  PERFORM 1 FROM cursors x WHERE x.partition_id = ANY (p_partitions) ORDER BY x.partition_id, x.group_id FOR UPDATE;
  -- What is left to do, now that nobody else changes it.
  SELECT array_agg(v.id ORDER BY v.id), array_agg(v.queue_id ORDER BY v.id), array_agg(v.low ORDER BY v.id),
         array_agg(v.upto ORDER BY v.id), array_agg(v.first ORDER BY v.id), array_agg(v.last ORDER BY v.id)
    INTO ids, queue_ids, lows, uptos, firsts, lasts
    FROM (SELECT p.id, p.queue_id, u.low,
                 CASE WHEN p_settled THEN least(u.upto, (
                   SELECT min(coalesce(x.position, 0)) FROM groups g
                     LEFT JOIN cursors x ON x.group_id = g.id AND x.partition_id = p.id WHERE g.queue_id = p.queue_id))
                   ELSE u.upto END AS upto,
                 (SELECT m.seq FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq LIMIT 1) AS first,
                 (SELECT m.seq FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq DESC LIMIT 1) AS last,
                 p_settled AND NOT EXISTS (SELECT 1 FROM groups g WHERE g.queue_id = p.queue_id) AS unused
            FROM unnest(p_partitions, p_from, p_upto) AS u (partition_id, low, upto)
            JOIN partitions p ON p.id = u.partition_id OFFSET 0) v
   WHERE NOT v.unused AND v.upto >= v.low AND v.upto >= v.first AND v.low <= v.last;
  IF ids IS NULL THEN RETURN 0; END IF;
  -- What each group had settled of it, before it goes.
  WITH counted AS (
    INSERT INTO tally_log (queue_id, group_id, consumed)
    SELECT x.queue_id, x.group_id, -count(*)
      FROM unnest(ids, lows, uptos) AS u (id, low, upto)
      JOIN cursors x ON x.partition_id = u.id
      JOIN messages m ON m.partition_id = u.id AND m.seq BETWEEN u.low AND u.upto
     WHERE m.seq <= x.position OR x.settled @> m.seq
     GROUP BY 1, 2 RETURNING group_id, consumed)
  SELECT array_agg(counted.group_id), array_agg(-counted.consumed) INTO settled_groups, settled FROM counted;
  WITH removed AS (
    DELETE FROM messages m USING unnest(ids, lows, uptos) AS u (id, low, upto)
     WHERE m.partition_id = u.id AND m.seq BETWEEN u.low AND u.upto
    RETURNING m.partition_id)
  SELECT array_agg(coalesce(r.n, 0) ORDER BY u.id) INTO counts
    FROM unnest(ids) u (id) LEFT JOIN (SELECT partition_id, count(*) AS n FROM removed GROUP BY 1) r ON r.partition_id = u.id;
  INSERT INTO tally_log (queue_id, group_id, removed)
  SELECT u.queue_id, 0, sum(u.n) FROM unnest(queue_ids, counts) AS u (queue_id, n) GROUP BY 1 HAVING sum(u.n) > 0;
  -- The others were waiting for the rest.
  INSERT INTO tally_log (queue_id, group_id, removed)
  SELECT g.queue_id, g.id, u.n - coalesce(s.n, 0)
    FROM (SELECT u.queue_id, sum(u.n) AS n FROM unnest(queue_ids, counts) AS u (queue_id, n) GROUP BY 1) u
    JOIN groups g ON g.queue_id = u.queue_id
    LEFT JOIN unnest(settled_groups, settled) AS s (group_id, n) ON s.group_id = g.id
   WHERE u.n > coalesce(s.n, 0);
  UPDATE partitions p SET floor = u.last, holes = CASE WHEN u.low <= u.first THEN p.holes ELSE p.holes + u.n END,
         emptied_at = CASE WHEN u.low <= u.first AND u.upto >= u.last THEN clock_timestamp() ELSE p.emptied_at END
    FROM unnest(ids, lows, uptos, firsts, lasts, counts) AS u (id, low, upto, first, last, n) WHERE p.id = u.id AND u.n > 0;
  FOR w IN SELECT * FROM unnest(ids, queue_ids, lows, uptos, firsts, lasts, counts)
             AS u (id, queue_id, low, upto, first, last, n)
            WHERE u.n > 0 AND EXISTS (SELECT 1 FROM cursors x WHERE x.partition_id = u.id AND x.position >= 0 AND x.position < u.upto)
            ORDER BY u.id
  LOOP
    IF q.id IS DISTINCT FROM w.queue_id THEN SELECT * INTO q FROM queues WHERE id = w.queue_id; END IF;
    gone := int8multirange(int8range(CASE WHEN w.low <= w.first THEN 1 ELSE w.low END, least(w.upto, w.last) + 1));
    FOR c IN SELECT * FROM cursors x WHERE x.partition_id = w.id AND x.position >= 0 AND x.position < w.upto
              ORDER BY x.group_id LOOP
      c.settled := c.settled + (gone * int8multirange(int8range(c.position + 1, NULL)));
      IF c.leased && gone THEN
        UPDATE leases l SET open = l.open - gone
         WHERE l.partition_id = c.partition_id AND l.group_id = c.group_id AND l.queue_id > 0 AND l.open && gone;
        DELETE FROM leases l
         WHERE l.partition_id = c.partition_id AND l.group_id = c.group_id AND l.queue_id > 0 AND isempty(l.open);
        c.leased := c.leased - gone;
        IF isempty(c.leased) THEN c.next_expiry := NULL; END IF;
      END IF;
      IF c.failing THEN
        DELETE FROM attempts a WHERE a.partition_id = c.partition_id AND a.group_id = c.group_id AND gone @> a.seq;
      END IF;
      c.due_at := queue_next(c, q);
      PERFORM queue_keep(c);
    END LOOP;
  END LOOP;
  SELECT sum(n) INTO total FROM unnest(counts) n;
  RETURN total;
END $$;
