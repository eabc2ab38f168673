-- queue_extend: a lease lives until at least now + p_seconds; it is never shortened. Answers an outcome (ok, missing or expired)
-- and the earliest expiry over its partitions.
CREATE FUNCTION queue_extend(p_lease uuid, p_seconds int, OUT outcome text, OUT expires_at timestamptz) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  l leases; c cursors; until timestamptz; t timestamptz;
BEGIN
  outcome := 'missing';
  FOR l IN SELECT * FROM leases x WHERE x.lease_id = p_lease ORDER BY x.partition_id, x.group_id LOOP
    SELECT * INTO c FROM cursors x WHERE x.partition_id = l.partition_id AND x.group_id = l.group_id
     ORDER BY x.version DESC LIMIT 1 FOR UPDATE;
    t := clock_timestamp();
    until := t + make_interval(secs => p_seconds);
    UPDATE leases x SET expires_at = greatest(x.expires_at, until)
     WHERE x.lease_id = l.lease_id AND x.partition_id = l.partition_id AND x.group_id = l.group_id AND x.expires_at > t
    RETURNING x.expires_at INTO until;
    IF NOT FOUND THEN
      IF outcome = 'missing' THEN outcome := 'expired'; END IF;
      CONTINUE;
    END IF;
    outcome := 'ok';
    expires_at := least(expires_at, until);
    IF NOT (SELECT q.competing FROM queues q WHERE q.id = l.queue_id) THEN
      c.next_expiry := until;
      c.due_at := until;
      PERFORM queue_keep(c);
    END IF;
  END LOOP;
END $$;
