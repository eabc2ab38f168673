-- queue_exchange_one: queue_exchange for a single request whose acknowledgement and pop are usual, in short statements by
-- key. A statement over sets has some 25 plan nodes, and setting them up costs more than the work for one request.
-- k_  a lease to be completed as a whole, see queue_exchange; NULL = none
-- p_  a pop from any one partition; NULL = none. p_back NULL = do not say whether there is nothing
-- Answers one row, the columns in the order of queue_exchange's. A pop that meets anything unusual has no note: ask
-- queue_exchange.
CREATE FUNCTION queue_exchange_one(
  k_partition bigint, k_group int, k_version bigint, k_lease uuid, k_upto bigint, k_times timestamptz[],
  p_group int, p_batch int, p_lease uuid, p_since timestamptz, p_back timestamptz, p_bytes bigint,
  OUT request int, OUT partition_id bigint, OUT partition text, OUT seqs bigint[], OUT transactions text[], OUT traces uuid[],
  OUT times timestamptz[], OUT producers text[], OUT keys text[], OUT payloads bytea[], OUT headers bytea[], OUT note text,
  OUT wait double precision, OUT due timestamptz, OUT version bigint, OUT done int[], OUT left_over boolean[]
) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET max_parallel_workers_per_gather = 0
AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock_timestamp(); n bigint; hi bigint; size bigint; of_queue int; more boolean; k record;
  expires timestamptz; taken int8multirange;
BEGIN
  request := 1;
  IF k_partition IS NOT NULL THEN
    n := cardinality(k_times);
    UPDATE cursors c
       SET version = c.version + 1, position = k_upto, leased = '{}', next_expiry = NULL,
           consumed = c.consumed + n, batches = c.batches + 1, consumed_at = t,
           due_at = CASE WHEN EXISTS (SELECT 1 FROM messages m WHERE m.partition_id = k_partition AND m.seq > k_upto)
                         THEN clock_timestamp() ELSE queue_rest(k_partition, k_group, k_upto, false, NULL) END
     WHERE c.partition_id = k_partition AND c.group_id = k_group AND c.version = k_version
       AND c.lease_id = k_lease AND c.next_expiry > t
    RETURNING c.queue_id, c.due_at IS NOT NULL INTO of_queue, more;
    IF FOUND THEN
      done := '{1}'; left_over := ARRAY[more];
      DELETE FROM leases l WHERE l.lease_id = k_lease AND l.partition_id = k_partition AND l.group_id = k_group;
      INSERT INTO tally_log (queue_id, group_id, consumed, done, bucket, counts)
      VALUES (of_queue, k_group, n, n, latency_bucket(t - k_times[n]), CASE WHEN n > 1 THEN latency_counts(k_times, t) END);
    END IF;
  END IF;
  IF p_group IS NULL THEN RETURN; END IF;

  t := clock_timestamp();  -- what was acknowledged a moment ago is due
  SELECT c.ctid AS place, c.partition_id, c.version, c.position, c.due_at, p.name, q.id AS queue_id, q.lease_time,
         c.position >= 0 AND NOT c.failing AND isempty(c.leased) AND isempty(c.settled) AND q.deleted_at IS NULL
         AND NOT q.competing AND q.window_buffer = 0 AND q.delayed_processing = 0 AND q.ttl = 0 AS plain
    INTO k
    FROM cursors c JOIN partitions p ON p.id = c.partition_id JOIN queues q ON q.id = c.queue_id
   WHERE c.group_id = p_group AND c.due_at >= coalesce(p_since, '-infinity') AND c.due_at <= t
   ORDER BY c.due_at LIMIT 1 FOR UPDATE OF c SKIP LOCKED;
  IF k.place IS NULL THEN  -- is there nothing at all?
    IF p_back IS NOT NULL THEN
      SELECT 'empty', coalesce(extract(epoch FROM c.due_at - t), 2) INTO note, wait
        FROM groups g
        JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL AND NOT q.competing
        LEFT JOIN LATERAL (
          SELECT c.due_at FROM cursors c
           WHERE c.group_id = g.id AND c.due_at >= p_back AND c.due_at < t + interval '2 seconds'
           ORDER BY c.due_at LIMIT 1) c ON true
       WHERE g.id = p_group AND g.discovered >= g.discover_to AND (c.due_at IS NULL OR c.due_at > t);
    END IF;
    RETURN;
  END IF;
  IF NOT k.plain THEN RETURN; END IF;
  SELECT count(*), max(m.seq), sum(octet_length(m.payload)) + coalesce(sum(octet_length(m.headers)), 0),
         array_agg(m.seq), array_agg(m.transaction_id), CASE WHEN count(m.trace_id) > 0 THEN array_agg(m.trace_id) END,
         array_agg(m.created_at), CASE WHEN count(m.producer) > 0 THEN array_agg(m.producer) END,
         CASE WHEN count(m.key_id) > 0 THEN array_agg(m.key_id) END, array_agg(m.payload),
         CASE WHEN count(m.headers) > 0 THEN array_agg(m.headers) END
    INTO n, hi, size, seqs, transactions, traces, times, producers, keys, payloads, headers
    FROM (SELECT * FROM messages m WHERE m.partition_id = k.partition_id AND m.seq > k.position
           ORDER BY m.seq LIMIT p_batch) m;
  IF hi IS DISTINCT FROM k.position + n OR size > p_bytes THEN
    seqs := NULL;
    RETURN;
  END IF;
  expires := t + make_interval(secs => CASE WHEN k.lease_time > 0 THEN k.lease_time ELSE 60 END);
  taken := int8multirange(int8range(k.position + 1, hi + 1));
  UPDATE cursors c SET version = c.version + 1, leased = taken, due_at = expires, next_expiry = expires, lease_id = p_lease
   WHERE c.ctid = k.place RETURNING c.version INTO version;
  INSERT INTO leases (lease_id, partition_id, group_id, queue_id, taken_at, expires_at, taken, open)
  VALUES (p_lease, k.partition_id, p_group, k.queue_id, t, expires, taken, taken);
  partition_id := k.partition_id; partition := k.name; due := k.due_at; note := 'ok';
END $$;
