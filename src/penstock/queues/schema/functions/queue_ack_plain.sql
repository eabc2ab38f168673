-- queue_ack_plain: the usual acknowledgements of a call, all in one statement: runs that complete the
-- whole of a lease which is the cursor's only one, begins right behind its position and never failed.
-- Arguments are those of queue_ack; answers are its rows, with the number of the run. A run that is
-- not listed is not usual, or its cursor changed at this moment: nothing of it was done.
-- The cursors that it means to change are found, then updated only if they are still at the version that
-- was looked at, in the order in which everybody locks them.
CREATE FUNCTION queue_ack_plain(
  p_starts int[], p_partitions bigint[], p_groups text[], p_leases uuid[], p_statuses text[],
  p_transactions text[]
) RETURNS TABLE (run int, items int[], queue text, partition text, more boolean) LANGUAGE plpgsql AS $$
DECLARE
  t timestamptz := clock_timestamp();
BEGIN
  RETURN QUERY
  WITH whole AS MATERIALIZED (
    SELECT r.ord, r.start, r.stop, l.lease_id, l.partition_id, l.group_id, l.queue_id,
           k.place, k.version, m.hi, m.n, m.times, q.name AS queue, p.name AS partition
      FROM (SELECT u.start, coalesce(u.stop, cardinality(p_transactions)) AS stop, u.partition_id,
                   u.group_name, u.lease_id, u.status, u.ord
              FROM unnest(p_starts, p_starts[2:], p_partitions, p_groups, p_leases, p_statuses)
                     WITH ORDINALITY u (start, stop, partition_id, group_name, lease_id, status, ord)) r
     CROSS JOIN LATERAL (  -- LIMIT: by its key, however few leases the planner thinks there are
       SELECT * FROM leases x WHERE x.lease_id = r.lease_id AND x.partition_id = r.partition_id LIMIT 1) l
      JOIN groups g ON g.id = l.group_id AND g.name = r.group_name
       AND upper(l.open) - lower(l.open) = r.stop - r.start
      JOIN queues q ON q.id = l.queue_id
      JOIN partitions p ON p.id = l.partition_id
     CROSS JOIN LATERAL (
       SELECT x.ctid AS place, x.version, x.position, x.leased, x.settled, x.failing FROM cursors x
        WHERE x.partition_id = l.partition_id AND x.group_id = l.group_id
        ORDER BY x.version DESC LIMIT 1) k
     CROSS JOIN LATERAL (
       SELECT count(*) AS n, max(m.seq) AS hi, array_agg(m.transaction_id) AS transactions,
              array_agg(m.created_at) AS times
         FROM (SELECT m.seq, m.transaction_id, m.created_at FROM messages m
                WHERE m.partition_id = l.partition_id AND m.seq > k.position
                  AND m.seq < upper(l.open) ORDER BY m.seq LIMIT r.stop - r.start) m) m
     WHERE r.status = 'completed' AND l.expires_at > t
       AND NOT k.failing AND isempty(k.settled) AND k.leased = l.open
       AND l.open = int8multirange(int8range(k.position + 1, m.hi + 1)) AND m.hi = k.position + m.n
       AND m.transactions = p_transactions[r.start + 1 : r.stop]
     ORDER BY l.partition_id, l.group_id
  ), moved AS (
    UPDATE cursors c
       SET version = c.version + 1, position = w.hi, leased = '{}', next_expiry = NULL,
           consumed = c.consumed + w.n, batches = c.batches + 1, consumed_at = t,
           due_at = CASE WHEN EXISTS (SELECT 1 FROM messages m
                                       WHERE m.partition_id = w.partition_id AND m.seq > w.hi)
                         THEN clock_timestamp()
                         ELSE queue_rest(w.partition_id, w.group_id, w.hi, false, NULL) END
      FROM whole w
     WHERE c.ctid = w.place AND c.version = w.version
    RETURNING w.*, c.due_at IS NOT NULL AS more
  ), ended AS (
    DELETE FROM leases l USING moved w
     WHERE l.lease_id = ANY (ARRAY(SELECT x.lease_id FROM moved x))
       AND l.lease_id = w.lease_id AND l.partition_id = w.partition_id AND l.group_id = w.group_id
  ), counted AS (
    INSERT INTO tally_log (queue_id, group_id, consumed, done, bucket, counts)
    SELECT w.queue_id, w.group_id, count(*), count(*), latency_bucket(t - max(x.at)),
           CASE WHEN count(*) > 1 THEN latency_counts(array_agg(x.at ORDER BY x.at), t) END
      FROM moved w CROSS JOIN LATERAL unnest(w.times) x (at) GROUP BY 1, 2
  )
  SELECT w.ord::int,
         CASE WHEN w.n = 1 THEN ARRAY[w.stop] ELSE ARRAY(SELECT generate_series(w.start + 1, w.stop)) END,
         w.queue, w.partition, w.more
    FROM moved w;
END $$;
