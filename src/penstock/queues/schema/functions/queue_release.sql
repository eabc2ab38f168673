-- queue_release: end leases as a whole. With p_settle their open messages count as completed (auto-ack), without they are
-- free again and no attempt is counted (the waiting client is gone). Answers the groups of the leases that were there.
-- Planned once per session, like append.
CREATE FUNCTION queue_release(p_leases uuid[], p_settle boolean) RETURNS SETOF int
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  l leases; c cursors; q queues; times timestamptz[]; n bigint;
BEGIN
  FOR l IN SELECT * FROM leases x WHERE x.lease_id = ANY (p_leases) ORDER BY x.partition_id, x.group_id LOOP
    SELECT * INTO c FROM cursors x WHERE x.partition_id = l.partition_id AND x.group_id = l.group_id
     ORDER BY x.version DESC LIMIT 1 FOR UPDATE;
    DELETE FROM leases x WHERE x.lease_id = l.lease_id AND x.partition_id = l.partition_id AND x.group_id = l.group_id
    RETURNING * INTO l;
    CONTINUE WHEN NOT FOUND OR c.version IS NULL;
    SELECT * INTO q FROM queues WHERE id = l.queue_id;
    c.leased := c.leased - l.open;
    IF isempty(c.leased) THEN c.next_expiry := NULL; END IF;
    IF p_settle THEN
      SELECT coalesce(array_agg(m.created_at), '{}') INTO times FROM unnest(l.open) r, LATERAL (
        SELECT m.created_at FROM messages m WHERE m.partition_id = l.partition_id AND m.seq >= lower(r) AND m.seq < upper(r)
         ORDER BY m.seq LIMIT upper(r) - lower(r)) m;
      c.settled := c.settled + l.open;
      n := cardinality(times);
      c.consumed := c.consumed + n;
      c.batches := c.batches + 1;
      c.consumed_at := clock_timestamp();
      IF c.failing THEN
        DELETE FROM attempts a WHERE a.partition_id = l.partition_id AND a.group_id = l.group_id AND l.open @> a.seq;
      END IF;
      INSERT INTO tally_log (queue_id, group_id, consumed, done, bucket, counts)
      VALUES (l.queue_id, l.group_id, n, n, latency_bucket(c.consumed_at - times[n]), latency_counts(times, c.consumed_at));
    END IF;
    c.due_at := queue_next(c, q);
    PERFORM queue_keep(c);
    RETURN NEXT l.group_id;
  END LOOP;
END $$;
