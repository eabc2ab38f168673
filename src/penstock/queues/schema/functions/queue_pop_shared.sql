-- queue_pop_shared: the usual pops of one group whose consumers share partitions (`ordering: none`), all in one
-- statement: the next messages of the first partition that is due, dealt out to p_places (positions in p_batches and
-- p_leases) in order, each under its own lease, and one change of the cursor for all. Usual: nothing failed or expired,
-- and what is leased or answered beyond the position has no gap. Only for queues that delay and drop nothing.
-- Answers rows like queue_pop's, one per request that it served; none = nothing was done. Those that are not listed found
-- nothing left in this partition. None takes more than its share of p_bytes.
CREATE FUNCTION queue_pop_shared(
  g groups, q queues, p_places int[], p_batches int[], p_leases uuid[], p_since timestamptz, p_now timestamptz,
  p_bytes bigint
) RETURNS TABLE (
  request int, partition_id bigint, partition text, seqs bigint[], transactions text[], traces uuid[], times timestamptz[],
  producers text[], keys text[], payloads bytea[], headers bytea[], size bigint, due timestamptz
) LANGUAGE plpgsql AS $$
DECLARE
  expires timestamptz := p_now + make_interval(secs => CASE WHEN q.lease_time > 0 THEN q.lease_time ELSE 60 END);
BEGIN
  RETURN QUERY
  WITH wanted AS MATERIALIZED (
    SELECT u.place, p_batches[u.place] AS batch,
           sum(p_batches[u.place]) OVER (ORDER BY u.place) - p_batches[u.place] AS skip
      FROM unnest(p_places) u (place)
  ), due AS MATERIALIZED (
    SELECT k.ctid AS place, k.partition_id, k.version, k.position, k.due_at, k.next_expiry, k.failing,
           k.settled + k.leased AS busy
      FROM cursors k
     WHERE k.group_id = g.id AND k.due_at >= coalesce(p_since, '-infinity') AND k.due_at <= p_now
     ORDER BY k.due_at LIMIT 1 FOR UPDATE SKIP LOCKED
  ), free AS MATERIALIZED (
    SELECT d.*, coalesce(upper(d.busy), d.position + 1) AS start FROM due d
     WHERE d.position >= 0 AND NOT d.failing AND (d.next_expiry IS NULL OR d.next_expiry > p_now)
       AND (isempty(d.busy) OR d.busy = int8multirange(int8range(d.position + 1, upper(d.busy))))
  ), batch AS MATERIALIZED (
    SELECT w.place AS request, f.partition_id, f.due_at, p_leases[w.place] AS lease_id,
           int8multirange(int8range(f.start + w.skip, m.hi + 1)) AS taken, m.*
      FROM free f CROSS JOIN wanted w CROSS JOIN LATERAL (
        SELECT count(*) AS n, max(m.seq) AS hi, sum(octet_length(m.payload)) + coalesce(sum(octet_length(m.headers)), 0) AS size, array_agg(m.seq) AS seqs,
               array_agg(m.transaction_id) AS transactions,
               CASE WHEN count(m.trace_id) > 0 THEN array_agg(m.trace_id) END AS traces,
               array_agg(m.created_at) AS times,
               CASE WHEN count(m.producer) > 0 THEN array_agg(m.producer) END AS producers,
               CASE WHEN count(m.key_id) > 0 THEN array_agg(m.key_id) END AS keys,
               array_agg(m.payload) AS payloads,
               CASE WHEN count(m.headers) > 0 THEN array_agg(m.headers) END AS headers
          FROM (SELECT * FROM messages m WHERE m.partition_id = f.partition_id AND m.seq >= f.start + w.skip
                   AND m.seq < f.start + w.skip + w.batch ORDER BY m.seq LIMIT w.batch) m) m
     WHERE m.hi = f.start + w.skip + m.n - 1 AND m.size <= p_bytes / cardinality(p_places)
  ), claimed AS (
    UPDATE cursors c
       SET version = c.version + 1, leased = c.leased + b.taken, next_expiry = least(c.next_expiry, expires),
           lease_id = b.lease_id,
           due_at = CASE WHEN b.n >= (SELECT sum(w.batch) FROM wanted w) THEN clock_timestamp()
                         ELSE queue_rest(f.partition_id, g.id, b.hi, false, least(c.next_expiry, expires)) END
      FROM free f CROSS JOIN (
        SELECT range_agg(x.taken) AS taken, sum(x.n) AS n, max(x.hi) AS hi, (array_agg(x.lease_id))[1] AS lease_id
          FROM batch x HAVING count(*) > 0) b
     WHERE c.ctid = f.place AND c.version = f.version
    RETURNING 1
  ), leased AS (
    INSERT INTO leases (lease_id, partition_id, group_id, queue_id, taken_at, expires_at, taken, open)
    SELECT b.lease_id, b.partition_id, g.id, q.id, p_now, expires, b.taken, b.taken FROM claimed CROSS JOIN batch b
  )
  SELECT b.request, b.partition_id, (SELECT p.name FROM partitions p WHERE p.id = b.partition_id), b.seqs, b.transactions,
         b.traces, b.times, b.producers, b.keys, b.payloads, b.headers, b.size, b.due_at
    FROM claimed CROSS JOIN batch b;
END $$;
