-- queue_remove: delete stored messages, one range [from, upto] per partition (no partition twice). With p_settled only the
-- part that every group has settled, from the front. Keeps counters exact, cursors and leases in step, and the last used
-- sequence number known. Answers how many were deleted.
CREATE OR REPLACE FUNCTION queue_remove(p_partitions bigint[], p_from bigint[], p_upto bigint[], p_settled boolean)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  w record; c cursors; q queues; n bigint; total bigint := 0; last bigint; first bigint; upto bigint; reached bigint;
  gone int8multirange; counts bigint[];
BEGIN
  PERFORM 1 FROM partitions p WHERE p.id = ANY (p_partitions) ORDER BY p.id FOR NO KEY UPDATE;
  FOR w IN
    SELECT u.*, p.queue_id FROM unnest(p_partitions, p_from, p_upto) AS u (partition_id, low, upto)
      JOIN partitions p ON p.id = u.partition_id ORDER BY u.partition_id
  LOOP
    upto := w.upto;
    IF q.id IS DISTINCT FROM w.queue_id THEN SELECT * INTO q FROM queues WHERE id = w.queue_id; END IF;
    PERFORM 1 FROM cursors x WHERE x.partition_id = w.partition_id ORDER BY x.group_id FOR UPDATE;
    IF p_settled THEN
      SELECT min(coalesce(x.position, 0)) INTO reached
        FROM groups g LEFT JOIN cursors x ON x.group_id = g.id AND x.partition_id = w.partition_id
       WHERE g.queue_id = w.queue_id;
      upto := least(upto, reached);
      CONTINUE WHEN upto IS NULL OR upto < w.low;
    END IF;
    SELECT m.seq INTO first FROM messages m WHERE m.partition_id = w.partition_id ORDER BY m.seq LIMIT 1;
    CONTINUE WHEN NOT FOUND;
    SELECT m.seq INTO last FROM messages m WHERE m.partition_id = w.partition_id ORDER BY m.seq DESC LIMIT 1;
    -- What each group had settled of it, before it goes.
    INSERT INTO tally_log (queue_id, group_id, consumed)
    SELECT x.queue_id, x.group_id, -count(*) FROM cursors x JOIN messages m ON m.partition_id = x.partition_id
     WHERE x.partition_id = w.partition_id AND m.seq BETWEEN w.low AND upto AND (m.seq <= x.position OR x.settled @> m.seq)
     GROUP BY 1, 2;
    DELETE FROM messages m WHERE m.partition_id = w.partition_id AND m.seq BETWEEN w.low AND upto;
    GET DIAGNOSTICS n = ROW_COUNT;
    CONTINUE WHEN n = 0;
    total := total + n;
    INSERT INTO tally_log (queue_id, group_id, removed) VALUES (w.queue_id, 0, n);
    UPDATE partitions p SET floor = last, holes = CASE WHEN w.low <= first THEN p.holes ELSE p.holes + n END
     WHERE p.id = w.partition_id;
    FOR c IN SELECT * FROM cursors x WHERE x.partition_id = w.partition_id AND x.position >= 0 AND x.position < upto
              ORDER BY x.group_id LOOP
      gone := int8multirange(int8range(CASE WHEN w.low <= first THEN 1 ELSE w.low END, least(upto, last) + 1));
      c.settled := c.settled + (gone * int8multirange(int8range(c.position + 1, NULL)));
      IF c.leased && gone THEN
        UPDATE leases l SET open = l.open - gone WHERE l.partition_id = c.partition_id AND l.group_id = c.group_id AND l.open && gone;
        DELETE FROM leases l WHERE l.partition_id = c.partition_id AND l.group_id = c.group_id AND isempty(l.open);
        c.leased := c.leased - gone;
        IF isempty(c.leased) THEN c.next_expiry := NULL; END IF;
      END IF;
      DELETE FROM attempts a WHERE a.partition_id = c.partition_id AND a.group_id = c.group_id AND gone @> a.seq;
      c.due_at := queue_next(c, q);
      PERFORM queue_keep(c);
    END LOOP;
  END LOOP;
  RETURN total;
END $$;
