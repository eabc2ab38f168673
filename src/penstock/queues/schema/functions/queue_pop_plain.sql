-- queue_pop_plain: the usual pops of one group, all in one statement: each of p_places (positions in
-- p_batches and p_leases) takes the next messages of a partition of its own, where nothing is leased,
-- failed or answered out of order (where consumers share partitions: queue_pop_shared). Only for queues that delay and
-- drop nothing.
-- Answers rows like queue_pop's, one per request that it served. One that is not listed met an unusual
-- cursor, or one that changed at this moment, or there is nothing: nothing was done for it.
-- None takes more than its share of p_bytes.
CREATE FUNCTION queue_pop_plain(
  g groups, q queues, p_places int[], p_batches int[], p_leases uuid[], p_since timestamptz, p_now timestamptz,
  p_bytes bigint
) RETURNS TABLE (
  request int, partition_id bigint, partition text, seqs bigint[], transactions text[], traces uuid[], times timestamptz[],
  producers text[], keys text[], payloads bytea[], headers bytea[], size bigint, due timestamptz
) LANGUAGE plpgsql AS $$
DECLARE
  expires timestamptz := p_now + make_interval(secs => CASE WHEN q.lease_time > 0 THEN q.lease_time ELSE 60 END);
BEGIN
  IF q.competing THEN
    RETURN QUERY SELECT * FROM queue_pop_shared(g, q, p_places, p_batches, p_leases, p_since, p_now, p_bytes);
    RETURN;
  END IF;
  RETURN QUERY
  WITH due AS MATERIALIZED (
    SELECT k.ctid AS place, k.partition_id, k.version, k.position, k.due_at,
           k.position >= 0 AND NOT k.failing AND isempty(k.leased) AND isempty(k.settled) AS plain
      FROM cursors k
     WHERE k.group_id = g.id AND k.due_at >= coalesce(p_since, '-infinity') AND k.due_at <= p_now
     ORDER BY k.due_at LIMIT cardinality(p_places) FOR UPDATE SKIP LOCKED
  ), batch AS MATERIALIZED (
    SELECT d.place, d.partition_id, d.version, d.position, d.due_at, p_places[d.nth] AS request,
           p_leases[p_places[d.nth]] AS lease_id, m.*
      FROM (SELECT d.*, row_number() OVER () AS nth FROM due d WHERE d.plain) d
     CROSS JOIN LATERAL (
       SELECT count(*) AS n, max(m.seq) AS hi, sum(octet_length(m.payload)) + coalesce(sum(octet_length(m.headers)), 0) AS size, array_agg(m.seq) AS seqs,
              array_agg(m.transaction_id) AS transactions,
              CASE WHEN count(m.trace_id) > 0 THEN array_agg(m.trace_id) END AS traces,
              array_agg(m.created_at) AS times,
              CASE WHEN count(m.producer) > 0 THEN array_agg(m.producer) END AS producers,
              CASE WHEN count(m.key_id) > 0 THEN array_agg(m.key_id) END AS keys,
              array_agg(m.payload) AS payloads,
              CASE WHEN count(m.headers) > 0 THEN array_agg(m.headers) END AS headers
         FROM (SELECT * FROM messages m WHERE m.partition_id = d.partition_id AND m.seq > d.position
                ORDER BY m.seq LIMIT p_batches[p_places[d.nth]]) m) m
     WHERE m.hi = d.position + m.n AND m.size <= p_bytes / cardinality(p_places)
  ), taken AS (
    UPDATE cursors c
       SET version = c.version + 1, leased = int8multirange(int8range(b.position + 1, b.hi + 1)),
           due_at = expires, next_expiry = expires, lease_id = b.lease_id
      FROM batch b
     WHERE c.ctid = b.place AND c.version = b.version
    RETURNING b.*, c.leased
  ), leased AS (
    INSERT INTO leases (lease_id, partition_id, group_id, queue_id, taken_at, expires_at, taken, open)
    SELECT x.lease_id, x.partition_id, g.id, q.id, p_now, expires, x.leased, x.leased FROM taken x
  )
  SELECT x.request, x.partition_id, (SELECT p.name FROM partitions p WHERE p.id = x.partition_id), x.seqs, x.transactions,
         x.traces, x.times, x.producers, x.keys, x.payloads, x.headers, x.size, x.due_at
    FROM taken x;
END $$;
