-- queue_rest: return when a cursor is due again, for which nothing visible beyond `p_seen` is free.
-- To say "not before ..." we must know that no push is under way: only with the partition's lock, which we try for and
-- never wait for (we hold the cursor). Without it: soon.
CREATE FUNCTION queue_rest(
  p_partition bigint, p_group int, p_seen bigint, p_failing boolean, p_expiry timestamptz
) RETURNS timestamptz LANGUAGE plpgsql AS $$
BEGIN
  PERFORM 1 FROM partitions WHERE id = p_partition FOR NO KEY UPDATE SKIP LOCKED;
  IF NOT FOUND THEN RETURN clock_timestamp(); END IF;
  IF EXISTS (SELECT 1 FROM messages WHERE partition_id = p_partition AND seq > p_seen) THEN
    RETURN clock_timestamp();
  END IF;
  IF NOT p_failing THEN RETURN p_expiry; END IF;
  RETURN least(p_expiry, (SELECT min(a.retry_at) FROM attempts a WHERE a.partition_id = p_partition AND a.group_id = p_group
                             AND NOT EXISTS (SELECT 1 FROM leases l WHERE l.partition_id = p_partition
                                                AND l.group_id = p_group AND l.queue_id > 0 AND l.open @> a.seq)));
END $$;
