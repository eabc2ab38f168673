-- queue_expire: end the leases of a locked cursor that have expired: an attempt of each message
-- that was not answered. It is not an attempt where a cycle left the lease with the message, or the
-- group is that of a query of Queen's clients (`streams.<name>`): their gates let a lease expire to
-- have a message again later. Answers the cursor, which the caller writes back.
CREATE FUNCTION queue_expire(c cursors, q queues, p_now timestamptz) RETURNS cursors
LANGUAGE plpgsql AS $$
DECLARE
  freed int8multirange; lost int8multirange;
BEGIN
  WITH gone AS MATERIALIZED (
    DELETE FROM leases l
     WHERE l.partition_id = c.partition_id AND l.group_id = c.group_id AND l.queue_id > 0
       AND l.expires_at <= p_now
    RETURNING l.open, l.kept)
  SELECT range_agg(r), range_agg(r) FILTER (WHERE NOT gone.kept) INTO freed, lost
    FROM gone, unnest(gone.open) r;
  SELECT min(l.expires_at) INTO c.next_expiry FROM leases l
   WHERE l.partition_id = c.partition_id AND l.group_id = c.group_id AND l.queue_id > 0;
  IF freed IS NOT NULL THEN c.leased := c.leased - freed; END IF;
  IF lost IS NULL OR EXISTS (
    SELECT 1 FROM groups g JOIN stream_queries s ON g.name = 'streams.' || s.name
     WHERE g.id = c.group_id AND s.source_queue = q.name) THEN RETURN c; END IF;
  c.failing := true;
  c.settled := c.settled + coalesce((
    SELECT (queue_fail(q, c.partition_id, c.group_id, array_agg(m.seq ORDER BY m.seq),
                       array_agg('the lease expired before the message was acknowledged'::text),
                       array_agg(0::double precision), NULL, p_now)).settled
      FROM unnest(lost) r, LATERAL (
        SELECT m.seq FROM messages m
         WHERE m.partition_id = c.partition_id AND m.seq >= lower(r) AND m.seq < upper(r)
         ORDER BY m.seq LIMIT upper(r) - lower(r)) m
    HAVING count(*) > 0), '{}');
  RETURN c;
END $$;
