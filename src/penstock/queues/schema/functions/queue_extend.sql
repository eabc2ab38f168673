-- queue_extend: leases live until at least now + seconds; never shortened. One row per lease asked for:
--   outcome ok, missing or expired; expires_at the earliest expiry over its partitions.
CREATE FUNCTION queue_extend(p_leases uuid[], p_seconds int[])
RETURNS TABLE (ord bigint, outcome text, expires_at timestamptz) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  i int; l leases; c cursors; until timestamptz; t timestamptz;
BEGIN
  FOR i IN 1 .. cardinality(p_leases) LOOP
    ord := i; outcome := 'missing'; expires_at := NULL;
    FOR l IN SELECT * FROM leases x WHERE x.lease_id = p_leases[i] ORDER BY x.partition_id, x.group_id LOOP
      SELECT * INTO c FROM cursors x WHERE x.partition_id = l.partition_id AND x.group_id = l.group_id
       ORDER BY x.version DESC LIMIT 1 FOR UPDATE;
      t := clock_timestamp();
      until := t + make_interval(secs => p_seconds[i]);
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
    RETURN NEXT;
  END LOOP;
END $$;
