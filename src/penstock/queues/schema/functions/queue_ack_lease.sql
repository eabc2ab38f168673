-- queue_ack_lease: complete the messages of a lease, if p_transactions are all that it has open.
-- Comparing them as a list beats looking up each. The caller locked the cursor. Answers whether it
-- was done; false = nothing changed.
CREATE FUNCTION queue_ack_lease(c cursors, q queues, p_lease uuid, p_transactions text[])
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  t timestamptz := clock_timestamp(); n bigint := cardinality(p_transactions);
  open int8multirange; listed text[]; times timestamptz[];
BEGIN
  SELECT x.open INTO open FROM leases x
   WHERE x.lease_id = p_lease AND x.partition_id = c.partition_id AND x.group_id = c.group_id
     AND x.expires_at > t;
  IF NOT FOUND OR n IS DISTINCT FROM (SELECT sum(upper(r) - lower(r)) FROM unnest(open) r) THEN
    RETURN false;
  END IF;
  SELECT array_agg(m.transaction_id), array_agg(m.created_at) INTO listed, times
    FROM unnest(open) r CROSS JOIN LATERAL (
      SELECT m.seq, m.transaction_id, m.created_at FROM messages m
       WHERE m.partition_id = c.partition_id AND m.seq >= lower(r) AND m.seq < upper(r)
       ORDER BY m.seq LIMIT upper(r) - lower(r)) m;
  IF listed IS DISTINCT FROM p_transactions
     AND (SELECT array_agg(x ORDER BY x COLLATE "C") FROM unnest(listed) x)
           IS DISTINCT FROM
         (SELECT array_agg(x ORDER BY x COLLATE "C") FROM unnest(p_transactions) x) THEN
    RETURN false;
  END IF;

  c.settled := c.settled + open;
  c.leased := c.leased - open;
  c.consumed := c.consumed + n;
  c.consumed_at := t;
  c.batches := c.batches + 1;
  INSERT INTO tally_log (queue_id, group_id, consumed, done, bucket, counts)
  VALUES (c.queue_id, c.group_id, n, n, latency_bucket(t - times[n]), latency_counts(times, t));
  IF c.failing THEN
    DELETE FROM attempts a
     WHERE a.partition_id = c.partition_id AND a.group_id = c.group_id AND open @> a.seq;
    c.failing := EXISTS (SELECT 1 FROM attempts a
                          WHERE a.partition_id = c.partition_id AND a.group_id = c.group_id);
  END IF;
  DELETE FROM leases x
   WHERE x.lease_id = p_lease AND x.partition_id = c.partition_id AND x.group_id = c.group_id;
  IF isempty(c.leased) THEN c.next_expiry := NULL; END IF;
  c.due_at := queue_next(c, q);
  PERFORM queue_keep(c);
  RETURN true;
END $$;
