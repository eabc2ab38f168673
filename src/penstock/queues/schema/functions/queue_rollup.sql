-- queue_rollup: fold the tally log into the tallies and the per-minute history. One broker at a time; answers the rows
-- folded, or NULL when another one is at it.
CREATE FUNCTION queue_rollup() RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  folded bigint;
BEGIN
  IF NOT pg_try_advisory_xact_lock(queue_lock_key('queue_rollup')) THEN
    RETURN NULL;
  END IF;
  WITH letters AS (DELETE FROM letter_log RETURNING *)
  INSERT INTO tallies AS t (queue_id, group_id, letters)
  SELECT queue_id, group_id, sum(letters) FROM letters GROUP BY 1, 2 HAVING sum(letters) <> 0 ORDER BY 1, 2
  ON CONFLICT (queue_id, group_id) DO UPDATE SET letters = t.letters + excluded.letters;
  WITH taken AS MATERIALIZED (DELETE FROM tally_log RETURNING *
  ), kept AS (
    INSERT INTO tallies AS t (queue_id, group_id, pushed, removed, consumed, done, failed, dead, dropped)
    SELECT queue_id, group_id, sum(pushed), sum(removed), sum(consumed), sum(done), sum(failed), sum(dead), sum(dropped)
      FROM taken GROUP BY 1, 2 ORDER BY 1, 2
    ON CONFLICT (queue_id, group_id) DO UPDATE SET
      pushed = t.pushed + excluded.pushed, removed = t.removed + excluded.removed,
      consumed = t.consumed + excluded.consumed, done = t.done + excluded.done, failed = t.failed + excluded.failed,
      dead = t.dead + excluded.dead, dropped = t.dropped + excluded.dropped
    RETURNING queue_id, group_id, CASE WHEN group_id = 0 THEN t.pushed - t.removed ELSE t.consumed END AS level
  ), minutes AS (
    SELECT date_trunc('minute', at) AS minute, queue_id, group_id, sum(pushed) AS pushed, sum(done) AS done,
           sum(failed) AS failed, sum(dead) AS dead, sum(retried) AS retried, sum(dropped) AS dropped,
           CASE WHEN group_id = 0 THEN sum(pushed) - sum(removed) ELSE sum(consumed) END AS moved
      FROM taken WHERE group_id >= 0 GROUP BY 1, 2, 3
  ), latencies AS (
    SELECT x.minute, x.queue_id, x.group_id, array_agg(x.bucket ORDER BY x.bucket) AS buckets,
           array_agg(x.n ORDER BY x.bucket) AS counts
      FROM (SELECT date_trunc('minute', t.at) AS minute, t.queue_id, t.group_id, (t.bucket + u.ord - 1)::smallint AS bucket,
                   sum(u.n)::bigint AS n
              FROM taken t, unnest(coalesce(t.counts, ARRAY[t.done])) WITH ORDINALITY AS u (n, ord)
             WHERE t.bucket IS NOT NULL AND u.n > 0 GROUP BY 1, 2, 3, 4) x GROUP BY 1, 2, 3
  ), remembered AS (
    INSERT INTO history AS h (minute, queue_id, group_id, pushed, done, failed, dead, retried, dropped, level, moved,
                              latency_buckets, latency_counts)
    SELECT m.minute, m.queue_id, m.group_id, m.pushed, m.done, m.failed, m.dead, m.retried, m.dropped,
           k.level - coalesce(sum(m.moved) OVER (PARTITION BY m.queue_id, m.group_id ORDER BY m.minute DESC
                                                 ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0),
           m.moved, l.buckets, l.counts
      FROM minutes m JOIN kept k USING (queue_id, group_id) LEFT JOIN latencies l USING (minute, queue_id, group_id)
     WHERE m.pushed + m.done + m.failed + m.retried > 0 OR m.moved <> 0 ORDER BY 1, 2, 3
    ON CONFLICT (minute, queue_id, group_id) DO UPDATE SET
      pushed = h.pushed + excluded.pushed, done = h.done + excluded.done,
      failed = h.failed + excluded.failed, dead = h.dead + excluded.dead,
      retried = h.retried + excluded.retried, dropped = h.dropped + excluded.dropped,
      level = excluded.level, moved = h.moved + excluded.moved,
      (latency_buckets, latency_counts) = (
        SELECT array_agg(x.bucket ORDER BY x.bucket), array_agg(x.n ORDER BY x.bucket)
          FROM (SELECT u.bucket, sum(u.n)::bigint AS n
                  FROM (SELECT * FROM unnest(h.latency_buckets, h.latency_counts)
                        UNION ALL SELECT * FROM unnest(excluded.latency_buckets, excluded.latency_counts)) u (bucket, n)
                 GROUP BY 1) x)
  )
  SELECT count(*) INTO folded FROM taken;
  RETURN folded;
END $$;
