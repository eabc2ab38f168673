-- take_shared: the common case of take where consumers share partitions (`ordering: none`): the next messages of the first
-- partition that is due are dealt out to p_pops (numbers of elements of p_batches and p_leases), each under its own lease, with one update
-- of the cursor. Common: nothing failed or expired, what is leased or settled beyond the position has no gap, and the queue
-- delays and drops nothing. Returns a row per pop that was served; the others find nothing more in this partition.
CREATE FUNCTION take_shared(
  g groups, q queues, p_pops int[], p_batches int[], p_leases uuid[], p_since timestamptz, p_now timestamptz, p_max_bytes bigint
) RETURNS SETOF taken LANGUAGE plpgsql AS $$
DECLARE
  expires timestamptz := p_now + make_interval(secs => CASE WHEN q.lease_time > 0 THEN q.lease_time ELSE 60 END);
BEGIN
  RETURN QUERY
  WITH wanted AS MATERIALIZED (
    SELECT u.pop, p_batches[u.pop] AS batch, sum(p_batches[u.pop]) OVER (ORDER BY u.pop) - p_batches[u.pop] AS skip
      FROM unnest(p_pops) u (pop)
  ), due AS MATERIALIZED (
    SELECT c.ctid AS row, c.partition_id, c.version, c.position, c.due_at, c.next_expiry, c.failing, c.settled + c.leased AS busy
      FROM cursors c
     WHERE c.group_id = g.id AND c.due_at >= coalesce(p_since, '-infinity') AND c.due_at <= p_now
     ORDER BY c.due_at LIMIT 1 FOR UPDATE SKIP LOCKED
  ), free AS MATERIALIZED (
    SELECT d.*, coalesce(upper(d.busy) - 1, d.position) AS seen FROM due d
     WHERE d.position >= 0 AND NOT d.failing AND (d.next_expiry IS NULL OR d.next_expiry > p_now)
       AND (isempty(d.busy) OR d.busy = int8multirange(int8range(d.position + 1, upper(d.busy))))
  ), batch AS MATERIALIZED (
    SELECT w.pop, f.partition_id, f.due_at, p_leases[w.pop] AS lease_id, m.*,
           int8multirange(int8range(f.seen + w.skip + 1, m.last + 1)) AS range
      FROM free f CROSS JOIN wanted w
     CROSS JOIN LATERAL messages_after(f.partition_id, f.seen + w.skip, w.batch) m
     WHERE m.last = f.seen + w.skip + m.n AND m.size <= p_max_bytes / cardinality(p_pops)
  ), claimed AS (
    UPDATE cursors c
       SET version = c.version + 1, leased = c.leased + b.range, next_expiry = least(c.next_expiry, expires), lease_id = b.lease_id,
           due_at = CASE WHEN b.n >= (SELECT sum(w.batch) FROM wanted w) THEN clock_timestamp()
                         ELSE queue_rest(f.partition_id, g.id, b.last, false, least(c.next_expiry, expires)) END
      FROM free f CROSS JOIN (
        SELECT range_agg(x.range) AS range, sum(x.n) AS n, max(x.last) AS last, (array_agg(x.lease_id))[1] AS lease_id
          FROM batch x HAVING count(*) > 0) b
     WHERE c.ctid = f.row AND c.version = f.version
    RETURNING 1
  ), leased AS (
    INSERT INTO leases (lease_id, partition_id, group_id, queue_id, taken_at, expires_at, taken, open)
    SELECT b.lease_id, b.partition_id, g.id, q.id, p_now, expires, b.range, b.range FROM claimed CROSS JOIN batch b
  )
  SELECT b.pop, 'ok', NULL::double precision, b.due_at, b.partition_id,
         (SELECT p.name FROM partitions p WHERE p.id = b.partition_id), NULL::bigint, b.seqs, b.transactions, b.traces, b.times,
         b.producers, b.keys, b.payloads, b.headers, NULL::int[]
    FROM claimed CROSS JOIN batch b;
END $$;
