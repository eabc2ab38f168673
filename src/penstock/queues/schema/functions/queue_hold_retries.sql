-- queue_hold_retries: take from p_free what failed and must wait for its next attempt. In strict
-- order nothing beyond the first such message is free; `retry` is its number.
CREATE FUNCTION queue_hold_retries(
  c cursors, q queues, p_free int8multirange, p_now timestamptz,
  OUT free int8multirange, OUT retry bigint
) LANGUAGE plpgsql AS $$
BEGIN
  IF q.competing THEN
    free := p_free - coalesce((
      SELECT range_agg(int8range(a.seq, a.seq + 1)) FROM attempts a
       WHERE a.partition_id = c.partition_id AND a.group_id = c.group_id AND a.retry_at > p_now), '{}');
  ELSE
    SELECT min(a.seq) INTO retry FROM attempts a
     WHERE a.partition_id = c.partition_id AND a.group_id = c.group_id AND a.retry_at > p_now;
    free := p_free * int8multirange(int8range(NULL, retry));
  END IF;
END $$;
