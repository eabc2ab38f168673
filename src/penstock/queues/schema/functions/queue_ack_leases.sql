-- queue_ack_leases: complete the messages of leases of one cursor, if p_transactions, each under its lease in p_leases, are
-- all that they have open. Comparing them as a list beats looking up each. The caller locked the cursor. Answers whether
-- it was done; false = nothing changed.
CREATE FUNCTION queue_ack_leases(c cursors, q queues, p_leases uuid[], p_transactions text[])
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  t timestamptz := clock_timestamp(); n bigint := cardinality(p_transactions);
  open int8multirange; listed text[]; holders uuid[]; times timestamptz[]; ended bigint;
BEGIN
  SELECT range_agg(r), array_agg(m.transaction_id ORDER BY u.ord, m.seq), array_agg(l.lease_id ORDER BY u.ord, m.seq),
         array_agg(m.created_at ORDER BY m.created_at)
    INTO open, listed, holders, times
    FROM (SELECT x.lease_id, min(x.ord) AS ord FROM unnest(p_leases) WITH ORDINALITY x (lease_id, ord) GROUP BY 1) u
   CROSS JOIN LATERAL (  -- LIMIT: by its key, however few leases the planner thinks there are
     SELECT * FROM leases x WHERE x.lease_id = u.lease_id AND x.partition_id = c.partition_id
        AND x.group_id = c.group_id AND x.expires_at > t LIMIT 1) l
   CROSS JOIN LATERAL unnest(l.open) r
   CROSS JOIN LATERAL (
     SELECT m.seq, m.transaction_id, m.created_at FROM messages m
      WHERE m.partition_id = c.partition_id AND m.seq >= lower(r) AND m.seq < upper(r)
      ORDER BY m.seq LIMIT upper(r) - lower(r)) m;
  IF listed IS NULL OR n IS DISTINCT FROM (SELECT sum(upper(r) - lower(r)) FROM unnest(open) r) THEN
    RETURN false;
  END IF;
  IF (listed <> p_transactions OR holders <> p_leases)
     AND (SELECT array_agg(x ORDER BY x.lease_id, x.name COLLATE "C") FROM unnest(holders, listed) x (lease_id, name))
           IS DISTINCT FROM
         (SELECT array_agg(x ORDER BY x.lease_id, x.name COLLATE "C") FROM unnest(p_leases, p_transactions) x (lease_id, name)) THEN
    RETURN false;
  END IF;

  c.settled := c.settled + open;
  c.leased := c.leased - open;
  c.consumed := c.consumed + n;
  c.consumed_at := t;
  INSERT INTO tally_log (queue_id, group_id, consumed, done, bucket, counts)
  VALUES (c.queue_id, c.group_id, n, n, latency_bucket(t - times[n]), latency_counts(times, t));
  IF c.failing THEN
    DELETE FROM attempts a
     WHERE a.partition_id = c.partition_id AND a.group_id = c.group_id AND open @> a.seq;
    c.failing := EXISTS (SELECT 1 FROM attempts a
                          WHERE a.partition_id = c.partition_id AND a.group_id = c.group_id);
  END IF;
  DELETE FROM leases x
   WHERE x.lease_id = ANY (p_leases) AND x.partition_id = c.partition_id AND x.group_id = c.group_id;
  GET DIAGNOSTICS ended = ROW_COUNT;
  c.batches := c.batches + ended;
  IF isempty(c.leased) THEN c.next_expiry := NULL; END IF;
  c.due_at := queue_next(c, q);
  PERFORM queue_keep(c);
  RETURN true;
END $$;
