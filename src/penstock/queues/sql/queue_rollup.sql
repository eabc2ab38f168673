-- queue_rollup: fold the tally log into the tallies and the per-minute history. One broker at a time; answers the rows
-- folded, or NULL when another one is at it.
CREATE OR REPLACE FUNCTION queue_rollup() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  folded bigint;
BEGIN
  IF NOT pg_try_advisory_xact_lock(hashtextextended('penstock.queue_rollup.' || current_schema(), 0)) THEN
    RETURN NULL;
  END IF;
  WITH taken AS MATERIALIZED (DELETE FROM tally_log RETURNING *
  ), kept AS (
    INSERT INTO tallies AS t (queue_id, group_id, pushed, removed, consumed, done, failed, dead, dropped)
    SELECT queue_id, group_id, sum(pushed), sum(removed), sum(consumed), sum(done), sum(failed), sum(dead), sum(dropped)
      FROM taken GROUP BY 1, 2 ORDER BY 1, 2
    ON CONFLICT (queue_id, group_id) DO UPDATE SET
      pushed = t.pushed + excluded.pushed, removed = t.removed + excluded.removed,
      consumed = t.consumed + excluded.consumed, done = t.done + excluded.done, failed = t.failed + excluded.failed,
      dead = t.dead + excluded.dead, dropped = t.dropped + excluded.dropped
  ), remembered AS (
    INSERT INTO history AS h (minute, queue_id, group_id, pushed, done, failed, dead)
    SELECT date_trunc('minute', at), queue_id, group_id, sum(pushed), sum(done), sum(failed), sum(dead)
      FROM taken GROUP BY 1, 2, 3 HAVING sum(pushed) + sum(done) + sum(failed) + sum(dead) > 0 ORDER BY 1, 2, 3
    ON CONFLICT (minute, queue_id, group_id) DO UPDATE SET
      pushed = h.pushed + excluded.pushed, done = h.done + excluded.done,
      failed = h.failed + excluded.failed, dead = h.dead + excluded.dead
  )
  SELECT count(*) INTO folded FROM taken;
  RETURN folded;
END $$;
