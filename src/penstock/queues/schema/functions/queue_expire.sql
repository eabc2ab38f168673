-- queue_expire: end the leases of a locked cursor that have expired: an attempt of each message
-- that was not answered. Answers the cursor, which the caller writes back.
CREATE FUNCTION queue_expire(c cursors, q queues, p_now timestamptz) RETURNS cursors
LANGUAGE plpgsql AS $$
DECLARE
  lost int8multirange;
BEGIN
  WITH gone AS MATERIALIZED (
    DELETE FROM leases l
     WHERE l.partition_id = c.partition_id AND l.group_id = c.group_id AND l.queue_id > 0
       AND l.expires_at <= p_now
    RETURNING l.open)
  SELECT range_agg(r) INTO lost FROM gone, unnest(gone.open) r;
  SELECT min(l.expires_at) INTO c.next_expiry FROM leases l
   WHERE l.partition_id = c.partition_id AND l.group_id = c.group_id AND l.queue_id > 0;
  IF lost IS NULL THEN RETURN c; END IF;
  c.leased := c.leased - lost;
  c.failing := true;
  c.settled := c.settled + coalesce((
    SELECT queue_fail(q, c.partition_id, c.group_id, array_agg(m.seq ORDER BY m.seq),
                      array_agg('the lease expired before the message was acknowledged'::text),
                      false, false, p_now)
      FROM unnest(lost) r, LATERAL (
        SELECT m.seq FROM messages m
         WHERE m.partition_id = c.partition_id AND m.seq >= lower(r) AND m.seq < upper(r)
         ORDER BY m.seq LIMIT upper(r) - lower(r)) m
    HAVING count(*) > 0), '{}');
  RETURN c;
END $$;
