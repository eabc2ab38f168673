-- queue_delayed_until: when the first message of p_free is due that waits for its delay, or the message
-- p_retry for its next attempt; NULL when there is no such message.
CREATE FUNCTION queue_delayed_until(
  c cursors, q queues, p_free int8multirange, p_retry bigint
) RETURNS timestamptz LANGUAGE plpgsql AS $$
DECLARE
  created timestamptz;
BEGIN
  IF q.delayed_processing > 0 THEN
    SELECT m.created_at INTO created FROM unnest(p_free) r CROSS JOIN LATERAL (
      SELECT m.created_at FROM messages m
       WHERE m.partition_id = c.partition_id AND m.seq >= lower(r) AND m.seq < upper(r)
       ORDER BY m.seq LIMIT 1) m LIMIT 1;
    IF FOUND THEN
      RETURN least(c.next_expiry, created + make_interval(secs => q.delayed_processing));
    END IF;
  END IF;
  RETURN (SELECT a.retry_at FROM attempts a
           WHERE a.partition_id = c.partition_id AND a.group_id = c.group_id AND a.seq = p_retry);
END $$;
