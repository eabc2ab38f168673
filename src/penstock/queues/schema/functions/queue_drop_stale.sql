-- queue_drop_stale: which of the free messages are too old to be delivered (ttl). They are counted
-- as dropped; the caller settles them.
CREATE FUNCTION queue_drop_stale(
  c cursors, q queues, p_free int8multirange, p_now timestamptz
) RETURNS int8multirange LANGUAGE plpgsql AS $$
DECLARE
  oldest timestamptz; limit_at timestamptz := p_now - make_interval(secs => q.ttl);
  stale int8multirange; n bigint;
BEGIN
  SELECT m.created_at INTO oldest FROM messages m
   WHERE m.partition_id = c.partition_id AND m.seq >= lower(p_free) ORDER BY m.seq LIMIT 1;
  IF NOT FOUND OR oldest > limit_at THEN RETURN '{}'; END IF;
  stale := p_free * int8multirange(int8range(NULL, queue_seq_at(c.partition_id, limit_at) + 1));
  SELECT count(*) INTO n FROM unnest(stale) r, LATERAL (
    SELECT 1 FROM messages m
     WHERE m.partition_id = c.partition_id AND m.seq >= lower(r) AND m.seq < upper(r)
     ORDER BY m.seq LIMIT upper(r) - lower(r)) m;
  INSERT INTO tally_log (queue_id, group_id, consumed, done, dropped)
  VALUES (c.queue_id, c.group_id, n, n, n);
  RETURN stale;
END $$;
