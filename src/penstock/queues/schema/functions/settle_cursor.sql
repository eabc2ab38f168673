-- settle_cursor: settle messages of one partition for one group. Arrays have one element per message; p_runs is what `outcomes`
-- and the others are returned by (see settle). The caller locked the cursor `c`, which is all NULL when the group has none there;
-- the queue is all NULL when the partition is gone.
CREATE FUNCTION settle_cursor(
  c cursors, q queues, p_partition bigint, p_runs int[], p_transactions text[], p_leases uuid[], p_statuses text[], p_errors text[],
  p_delays double precision[], p_limits int[]
) RETURNS TABLE (run int, outcomes text[], released boolean[], dead boolean[]) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock_timestamp(); n bigint := cardinality(p_transactions);
  listed text[]; holders uuid[];       -- the open messages of the leases, and the lease of each
  classes text[]; seqs bigint[];       -- what became of each message, and its number; NULL: all are ok
  answered int8multirange; completed int8multirange; times timestamptz[];
  failed bigint[]; failures text[]; delays double precision[]; limits int[];
  postponed boolean;                   -- a message is delivered again, but not at once
  given_up int8multirange; dead_ones int8multirange := '{}'; ended uuid[] := '{}';
BEGIN
  -- All that some leases have open is completed: comparing two lists beats looking up each message.
  IF c.version IS NOT NULL AND array_position(p_leases, NULL) IS NULL AND 'completed' = ALL (p_statuses) THEN
    SELECT range_agg(r), array_agg(m.transaction_id ORDER BY u.ord, m.seq), array_agg(l.lease_id ORDER BY u.ord, m.seq),
           array_agg(m.created_at ORDER BY m.created_at)
      INTO answered, listed, holders, times
      FROM (SELECT x.lease_id, min(x.ord) AS ord FROM unnest(p_leases) WITH ORDINALITY x (lease_id, ord) GROUP BY 1) u
     CROSS JOIN LATERAL (  -- LIMIT: by its key, however few leases the planner thinks there are
       SELECT * FROM leases x WHERE x.lease_id = u.lease_id AND x.partition_id = c.partition_id
          AND x.group_id = c.group_id AND x.expires_at > t LIMIT 1) l
     CROSS JOIN LATERAL unnest(l.open) r
     CROSS JOIN LATERAL (
       SELECT m.seq, m.transaction_id, m.created_at FROM messages m
        WHERE m.partition_id = c.partition_id AND m.seq >= lower(r) AND m.seq < upper(r)
        ORDER BY m.seq LIMIT upper(r) - lower(r)) m;
    IF n IS DISTINCT FROM (SELECT sum(upper(r) - lower(r)) FROM unnest(answered) r) OR n <> cardinality(listed)
       OR (listed <> p_transactions OR holders <> p_leases)
          AND (SELECT array_agg(x ORDER BY x.lease_id, x.id COLLATE "C") FROM unnest(holders, listed) x (lease_id, id))
                IS DISTINCT FROM
              (SELECT array_agg(x ORDER BY x.lease_id, x.id COLLATE "C") FROM unnest(p_leases, p_transactions) x (lease_id, id)) THEN
      answered := NULL;
    END IF;
    completed := answered;
  END IF;

  -- Otherwise each message by its transaction id.
  IF answered IS NULL THEN
    WITH item AS MATERIALIZED (
      SELECT i.ord, i.status, i.error, i.delay, i.max_attempts, i.lease_id, m.seq, m.created_at, row_number() OVER (PARTITION BY m.seq ORDER BY i.ord) AS nth
        FROM unnest(p_transactions, p_leases, p_statuses, p_errors, p_delays, p_limits) WITH ORDINALITY
               i (transaction_id, lease_id, status, error, delay, max_attempts, ord)
        LEFT JOIN LATERAL message_named(p_partition, i.transaction_id) m ON q.id IS NOT NULL
    ), lease AS MATERIALIZED (
      SELECT l.lease_id, l.open, l.taken FROM leases l
       WHERE l.lease_id = ANY (p_leases) AND l.partition_id = p_partition AND l.group_id = c.group_id AND l.expires_at > t
    ), classed AS MATERIALIZED (
      SELECT i.*, CASE
          WHEN i.seq IS NULL THEN 'missing'
          WHEN c.version IS NULL THEN 'idle'
          WHEN c.position >= i.seq OR c.settled @> i.seq THEN
            CASE WHEN i.status = 'completed' OR i.lease_id IS NULL OR l.taken @> i.seq
                   OR EXISTS (SELECT 1 FROM dead_letters d WHERE d.partition_id = p_partition AND d.seq = i.seq
                                 AND d.group_id = c.group_id) THEN 'done' ELSE 'lease' END
          WHEN i.lease_id IS NOT NULL AND l.taken @> i.seq IS NOT TRUE THEN 'lease'
          WHEN i.nth > 1 THEN 'done'
          WHEN i.lease_id IS NOT NULL AND NOT l.open @> i.seq THEN
            CASE WHEN i.status = 'completed' AND NOT c.leased @> i.seq THEN 'ok'
                 WHEN i.status = 'completed' THEN 'lease' ELSE 'done' END
          WHEN i.status IN ('failed', 'retry') AND NOT c.leased @> i.seq THEN 'done'
          ELSE 'ok' END AS class
        FROM item i LEFT JOIN lease l ON l.lease_id = i.lease_id
    ), retried AS (
      INSERT INTO tally_log (queue_id, group_id, retried)
      SELECT c.queue_id, c.group_id, count(*) FROM classed x WHERE x.class = 'ok' AND x.status = 'retry' HAVING count(*) > 0
    ), waiting AS (
      INSERT INTO attempts (partition_id, group_id, seq, attempts, retry_at, error)
      SELECT p_partition, c.group_id, x.seq, 0, t + make_interval(secs => x.delay), x.error
        FROM classed x WHERE x.class = 'ok' AND x.status = 'retry' AND x.delay > 0 ORDER BY x.seq
      ON CONFLICT (partition_id, group_id, seq) DO UPDATE SET retry_at = excluded.retry_at, error = excluded.error
      RETURNING 1
    ), failure AS (
      SELECT array_agg(x.seq ORDER BY x.seq) AS seqs, array_agg(x.delay ORDER BY x.seq) AS delays,
             array_agg(coalesce(x.error, CASE x.status WHEN 'dlq' THEN 'Moved to the dead-letter queue' ELSE 'Retries exhausted' END)
                       ORDER BY x.seq) AS errors,
             array_agg(CASE x.status WHEN 'dlq' THEN 0 ELSE x.max_attempts END ORDER BY x.seq) AS limits
        FROM classed x WHERE x.class = 'ok' AND x.status IN ('failed', 'dlq')
    ), completion AS (
      SELECT range_agg(int8range(x.seq, x.seq + 1)) AS seqs, count(*) AS n, array_agg(x.created_at ORDER BY x.seq) AS times
        FROM classed x WHERE x.class = 'ok' AND x.status = 'completed'
    )
    SELECT o.classes, o.seqs, o.answered, k.seqs, k.n, k.times, f.seqs, f.errors, f.delays, f.limits, EXISTS (SELECT 1 FROM waiting)
      INTO classes, seqs, answered, completed, n, times, failed, failures, delays, limits, postponed
      FROM (SELECT array_agg(x.class ORDER BY x.ord) AS classes, array_agg(x.seq ORDER BY x.ord) AS seqs,
                   range_agg(int8range(x.seq, x.seq + 1)) FILTER (WHERE x.class = 'ok') AS answered
              FROM classed x) o
     CROSS JOIN completion k CROSS JOIN failure f;
  END IF;

  IF answered IS NOT NULL THEN
    IF completed IS NOT NULL THEN
      c.settled := c.settled + completed;
      c.consumed := c.consumed + n;
      c.consumed_at := t;
      INSERT INTO tally_log (queue_id, group_id, consumed, done, bucket, counts)
      VALUES (c.queue_id, c.group_id, n, n, latency_bucket(t - times[n]), latency_counts(times, t));
      IF c.failing THEN
        DELETE FROM attempts a WHERE a.partition_id = p_partition AND a.group_id = c.group_id AND completed @> a.seq;
        c.failing := EXISTS (SELECT 1 FROM attempts a WHERE a.partition_id = p_partition AND a.group_id = c.group_id);
      END IF;
    END IF;
    c.failing := c.failing OR coalesce(postponed, false);
    IF failed IS NOT NULL THEN
      SELECT f.settled, f.dead INTO given_up, dead_ones
        FROM queue_fail(q, p_partition, c.group_id, failed, failures, delays, limits, t) f;
      c.settled := c.settled + given_up;
      c.failing := true;
    END IF;
    c.leased := c.leased - answered;
    -- Messages that were deleted while they were taken were never delivered: no answer will come for them.
    IF NOT q.competing AND NOT isempty(c.leased) AND NOT EXISTS (
         SELECT 1 FROM unnest(c.leased) r CROSS JOIN LATERAL (
           SELECT 1 FROM messages m WHERE m.partition_id = p_partition AND m.seq >= lower(r) AND m.seq < upper(r) LIMIT 1) m) THEN
      answered := answered + c.leased;
      c.settled := c.settled + c.leased;
      c.leased := '{}';
    END IF;
    IF isempty(c.leased) THEN c.next_expiry := NULL; END IF;
    ended := queue_close_leases(c, answered, p_leases);
    c.batches := c.batches + cardinality(ended);
    c.due_at := queue_next(c, q);
    PERFORM queue_keep(c);
  END IF;

  IF classes IS NULL THEN
    RETURN QUERY SELECT DISTINCT u.run, NULL::text[], NULL::boolean[], NULL::boolean[] FROM unnest(p_runs) u (run);
    RETURN;
  END IF;
  RETURN QUERY
    SELECT u.run, array_agg(u.class ORDER BY u.ord),
           array_agg(CASE WHEN u.class = 'idle' OR q.id IS NULL THEN NULL
                          WHEN u.lease_id IS NULL THEN cardinality(ended) > 0 AND u.class = 'ok'
                          ELSE u.lease_id = ANY (ended) END ORDER BY u.ord),
           array_agg(coalesce(dead_ones @> u.seq, false) ORDER BY u.ord)
      FROM unnest(p_runs, classes, seqs, p_leases) WITH ORDINALITY u (run, class, seq, lease_id, ord) GROUP BY 1;
END $$;
