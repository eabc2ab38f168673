-- queue_exchange: acknowledge, then pop, for many requests in one call and one commit. The usual ones of each kind are one
-- statement; what is unusual is left to queue_ack and queue_pop, in the same call.
-- k_  leases to be completed as a whole, by brokers that remember what they delivered under them (no partition and group
--     twice, ascending): the cursor's version since the pop, the last message's number, and when the messages were
--     created, k_starts saying how many times come before each lease's first. A cursor that changed since, or whose lease
--     expired, is left alone: ask for those with a_ again.
-- a_  other acknowledgements, the arguments of queue_ack
-- p_  pops, the arguments of queue_pop; p_partitions NULL = any for all, p_spans NULL = 1 for all. Pops from any one
--     partition come first, those of a group together: g_ids are these groups, g_starts how many pops come before the
--     first of each, g_plain how many they are in all. p_back NULL = only what is usual: a pop that meets anything else
--     or nothing has no row.
-- Any of the three may be NULL. Answers, as far as asked for, one row with `done`, the positions of the k_ that were
-- completed, and `left_over`, whether something is left for the group in that partition; queue_ack's rows (items is not
-- NULL); queue_pop's rows, with the version of the cursor where the lease is the only one and nothing is unusual.
-- Acknowledging waits for cursors in the order that all follow; popping, which comes after, waits for none.
CREATE FUNCTION queue_exchange(
  k_partitions bigint[], k_groups int[], k_versions bigint[], k_leases uuid[], k_uptos bigint[], k_starts int[],
  k_times timestamptz[],
  a_starts int[], a_partitions bigint[], a_groups text[], a_leases uuid[], a_statuses text[], a_errors text[],
  a_transactions text[],
  g_ids int[], g_starts int[], g_plain int,
  p_groups int[], p_partitions bigint[], p_batches int[], p_spans int[], p_leases uuid[], p_since timestamptz[],
  p_back timestamptz[], p_bytes bigint
) RETURNS TABLE (
  request int, partition_id bigint, partition text, seqs bigint[], transactions text[], traces uuid[], times timestamptz[],
  producers text[], keys text[], payloads bytea[], headers bytea[], note text, wait double precision, due timestamptz,
  version bigint, done int[], left_over boolean[],
  items int[], outcomes text[], queue text, released boolean[], dead boolean[], more boolean
) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET max_parallel_workers_per_gather = 0
AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock_timestamp(); served int := 0;
  drained boolean := false;  -- nothing comes after what was acknowledged, so there is probably nothing to take
BEGIN
  IF k_partitions IS NOT NULL THEN
    WITH moved AS (
      UPDATE cursors c
         SET version = c.version + 1, position = w.upto, leased = '{}', next_expiry = NULL,
             consumed = c.consumed + (w.stop - w.start), batches = c.batches + 1, consumed_at = t,
             due_at = CASE WHEN EXISTS (SELECT 1 FROM messages m
                                         WHERE m.partition_id = c.partition_id AND m.seq > w.upto)
                           THEN clock_timestamp()
                           ELSE queue_rest(c.partition_id, c.group_id, w.upto, false, NULL) END
        FROM (SELECT u.*, coalesce(u.next_start, cardinality(k_times)) AS stop
                FROM unnest(k_partitions, k_groups, k_versions, k_leases, k_uptos, k_starts, k_starts[2:])
                       WITH ORDINALITY u (partition_id, group_id, version, lease_id, upto, start, next_start, place)) w
       WHERE c.partition_id = w.partition_id AND c.group_id = w.group_id AND c.version = w.version
         AND c.lease_id = w.lease_id AND c.next_expiry > t
      RETURNING w.place, w.lease_id, c.partition_id, c.group_id, c.queue_id, w.start, w.stop, c.due_at IS NOT NULL AS more
    ), ended AS (
      DELETE FROM leases l USING moved w
       WHERE l.lease_id = w.lease_id AND l.partition_id = w.partition_id AND l.group_id = w.group_id
    ), counted AS (
      INSERT INTO tally_log (queue_id, group_id, consumed, done, bucket, counts)
      SELECT w.queue_id, w.group_id, count(*), count(*), latency_bucket(t - max(x.at)),
             CASE WHEN count(*) > 1 THEN latency_counts(array_agg(x.at ORDER BY x.at), t) END
        FROM moved w CROSS JOIN LATERAL unnest(k_times[w.start + 1 : w.stop]) x (at) GROUP BY 1, 2
    )
    SELECT array_agg(w.place::int), array_agg(w.more) INTO done, left_over FROM moved w;
    RETURN NEXT;
    drained := coalesce(NOT true = ANY (left_over), false) AND g_plain = cardinality(p_groups) AND cardinality(g_ids) = 1;
    done := NULL; left_over := NULL;
  END IF;
  IF a_starts IS NOT NULL THEN
    FOR items, outcomes, queue, partition, released, dead, more IN
      SELECT * FROM queue_ack(a_starts, a_partitions, a_groups, a_leases, a_statuses, a_errors, a_transactions)
    LOOP
      RETURN NEXT;
    END LOOP;
  END IF;
  IF p_groups IS NULL THEN RETURN; END IF;

  IF g_ids IS NOT NULL THEN
    t := clock_timestamp();  -- what was acknowledged a moment ago is due
    LOOP
      IF NOT drained THEN
        RETURN QUERY
        WITH due AS MATERIALIZED (
          SELECT d.*, u.id AS group_id, q.id AS queue_id,
                 t + make_interval(secs => CASE WHEN q.lease_time > 0 THEN q.lease_time ELSE 60 END) AS expires
            FROM unnest(g_ids, g_starts, g_starts[2:]) AS u (id, start, next_start)
            JOIN groups g ON g.id = u.id
            JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL AND NOT q.competing AND q.window_buffer = 0
             AND q.delayed_processing = 0 AND q.ttl = 0
           CROSS JOIN LATERAL (
             SELECT k.*, (u.start + row_number() OVER ())::int AS request
               FROM (SELECT k.ctid AS place, k.partition_id, k.version, k.position, k.due_at,
                            k.position >= 0 AND NOT k.failing AND isempty(k.leased) AND isempty(k.settled) AS plain
                       FROM cursors k
                      WHERE k.group_id = u.id AND k.due_at >= coalesce(p_since[u.start + 1], '-infinity') AND k.due_at <= t
                      ORDER BY k.due_at LIMIT coalesce(u.next_start, g_plain) - u.start FOR UPDATE SKIP LOCKED) k
              WHERE k.plain) d
        ), batch AS MATERIALIZED (
          SELECT d.*, p_leases[d.request] AS lease_id, m.*
            FROM due d
           CROSS JOIN LATERAL (
             SELECT count(*) AS n, max(m.seq) AS hi,
                    sum(octet_length(m.payload)) + coalesce(sum(octet_length(m.headers)), 0) AS size,
                    array_agg(m.seq) AS seqs, array_agg(m.transaction_id) AS transactions,
                    CASE WHEN count(m.trace_id) > 0 THEN array_agg(m.trace_id) END AS traces,
                    array_agg(m.created_at) AS times,
                    CASE WHEN count(m.producer) > 0 THEN array_agg(m.producer) END AS producers,
                    CASE WHEN count(m.key_id) > 0 THEN array_agg(m.key_id) END AS keys,
                    array_agg(m.payload) AS payloads,
                    CASE WHEN count(m.headers) > 0 THEN array_agg(m.headers) END AS headers
               FROM (SELECT * FROM messages m WHERE m.partition_id = d.partition_id AND m.seq > d.position
                      ORDER BY m.seq LIMIT p_batches[d.request]) m) m
           WHERE m.hi = d.position + m.n AND m.size <= p_bytes / cardinality(p_groups)
        ), taken AS (
          UPDATE cursors c
             SET version = c.version + 1, leased = int8multirange(int8range(b.position + 1, b.hi + 1)),
                 due_at = b.expires, next_expiry = b.expires, lease_id = b.lease_id
            FROM batch b
           WHERE c.ctid = b.place AND c.version = b.version
          RETURNING b.*, c.leased, c.version AS version_now
        ), leased AS (
          INSERT INTO leases (lease_id, partition_id, group_id, queue_id, taken_at, expires_at, taken, open)
          SELECT x.lease_id, x.partition_id, x.group_id, x.queue_id, t, x.expires, x.leased, x.leased FROM taken x
        )
        SELECT x.request, x.partition_id, (SELECT p.name FROM partitions p WHERE p.id = x.partition_id), x.seqs, x.transactions,
               x.traces, x.times, x.producers, x.keys, x.payloads, x.headers, 'ok', NULL::double precision, x.due_at,
               x.version_now, NULL::int[], NULL::boolean[], NULL::int[], NULL::text[], NULL::text, NULL::boolean[],
               NULL::boolean[], NULL::boolean
          FROM taken x;
        GET DIAGNOSTICS served = ROW_COUNT;
        IF served = cardinality(p_groups) OR p_back IS NULL THEN RETURN; END IF;
      END IF;
      IF served = 0 AND g_plain = cardinality(p_groups) AND cardinality(g_ids) = 1 THEN  -- is there nothing at all?
        RETURN QUERY
          SELECT u.place, NULL::bigint, NULL::text, NULL::bigint[], NULL::text[], NULL::uuid[], NULL::timestamptz[], NULL::text[],
                 NULL::text[], NULL::bytea[], NULL::bytea[], 'empty', coalesce(extract(epoch FROM k.due_at - t), 2)::double precision,
                 NULL::timestamptz, NULL::bigint, NULL::int[], NULL::boolean[], NULL::int[], NULL::text[], NULL::text,
                 NULL::boolean[], NULL::boolean[], NULL::boolean
            FROM groups g
            JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL AND NOT q.competing
            LEFT JOIN LATERAL (
              SELECT k.due_at FROM cursors k
               WHERE k.group_id = g.id AND k.due_at >= coalesce(p_back[1], '-infinity') AND k.due_at < t + interval '2 seconds'
               ORDER BY k.due_at LIMIT 1) k ON true
           CROSS JOIN generate_series(1, g_plain) u (place)
           WHERE g.id = g_ids[1] AND g.discovered >= g.discover_to AND (k.due_at IS NULL OR k.due_at > t);
        IF FOUND THEN RETURN; END IF;
      END IF;
      EXIT WHEN NOT drained;
      drained := false;
    END LOOP;
  END IF;
  RETURN QUERY
    SELECT r.places[x.request], x.partition_id, x.partition, x.seqs, x.transactions, x.traces, x.times, x.producers,
           x.keys, x.payloads, x.headers, x.note, x.wait, x.due, NULL::bigint, NULL::int[], NULL::boolean[], NULL::int[],
           NULL::text[], NULL::text, NULL::boolean[], NULL::boolean[], NULL::boolean
      FROM (SELECT array_agg(u.place::int) AS places, array_agg(u.group_id) AS groups,
                   array_agg(p_partitions[u.place]) AS partitions, array_agg(p_batches[u.place]) AS batches,
                   array_agg(coalesce(p_spans[u.place], 1)) AS spans, array_agg(p_leases[u.place]) AS leases,
                   array_agg(p_since[u.place]) AS since, array_agg(p_back[u.place]) AS back
              FROM unnest(p_groups) WITH ORDINALITY u (group_id, place)
             WHERE served = 0 OR NOT EXISTS (SELECT 1 FROM leases l WHERE l.lease_id = p_leases[u.place])) r
     CROSS JOIN LATERAL queue_pop(r.groups, r.partitions, r.batches, r.spans, r.leases, r.since, r.back,
                                  p_bytes * cardinality(r.groups) / cardinality(p_groups)) x;
END $$;
