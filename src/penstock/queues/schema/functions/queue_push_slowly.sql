-- queue_push_slowly: queue_push for calls with something unusual in them: a duplicate, a queue with maxSize or encryption,
-- a partition that is gone, a message for later. Same arguments; a number per item as the answer; the caller has locked the
-- partitions. What is for later takes room in a queue with maxSize from now on, so that it fits when it is due.
-- Planned for each call: how its joins are best done depends on how many items there are.
CREATE FUNCTION queue_push_slowly(
  p_ids bigint[], p_starts int[], p_transactions text[], p_checks boolean[], p_traces uuid[], p_producers text[],
  p_keys text[], p_payloads bytea, p_payload_bounds int[], p_headers bytea, p_header_bounds int[], p_dues timestamptz[],
  p_delays double precision[], t timestamptz,
  OUT answers bigint[], OUT dues timestamptz[]
) LANGUAGE plpgsql SET plan_cache_mode = force_custom_plan AS $$
DECLARE
  room jsonb := '{}'; limited int; filled bigint[]; LATER CONSTANT bigint := 1::bigint << 60;
BEGIN
  FOR limited IN
    SELECT DISTINCT q.id FROM partitions p JOIN queues q ON q.id = p.queue_id
     WHERE p.id = ANY (p_ids) AND q.max_size > 0 ORDER BY 1
  LOOP  -- one push at a time into a queue whose size is limited: the count is exact
    PERFORM 1 FROM queues WHERE id = limited FOR NO KEY UPDATE;
    room := room || jsonb_build_object(limited::text,
      (SELECT greatest(0, q.max_size - queue_depth(q.id)) FROM queues q WHERE q.id = limited));
  END LOOP;

  WITH item AS MATERIALIZED (
    SELECT i.id AS partition_id, i.n AS ord, p_transactions[i.n] AS transaction_id,
           p_checks[least(i.n, cardinality(p_checks))] AS checked, p_traces[i.n] AS trace_id, p_producers[i.n] AS producer,
           p_keys[i.n] AS key_id,
           substring(p_payloads FROM p_payload_bounds[i.n] FOR p_payload_bounds[i.n + 1] - p_payload_bounds[i.n]) AS payload,
           CASE WHEN p_header_bounds[i.n + 1] > p_header_bounds[i.n]
                THEN substring(p_headers FROM p_header_bounds[i.n] FOR p_header_bounds[i.n + 1] - p_header_bounds[i.n])
           END AS headers,
           coalesce(p_dues[i.n], t + make_interval(secs => p_delays[i.n])) AS due_at
      FROM (SELECT l.id, generate_series(l.start + 1, coalesce(l.stop, cardinality(p_transactions))) AS n
              FROM unnest(p_ids, p_starts, p_starts[2:]) AS l (id, start, stop)) i
  ), log AS MATERIALIZED (
    SELECT p.id, p.queue_id, p.scheduled, q.encryption_enabled, coalesce(last.seq, p.floor) AS head,
           greatest(t, last.created_at) AS created_at
      FROM partitions p JOIN queues q ON q.id = p.queue_id AND q.deleted_at IS NULL
      LEFT JOIN LATERAL (SELECT m.seq, m.created_at FROM messages m WHERE m.partition_id = p.id
                          ORDER BY m.seq DESC LIMIT 1) last ON true
     WHERE p.id = ANY (p_ids)
  ), looked AS MATERIALIZED (
    SELECT i.ord, i.partition_id, l.queue_id, i.due_at, twin.seq AS twin, waiting.due_at AS twin_due_at
      FROM item i JOIN log l ON l.id = i.partition_id
      LEFT JOIN LATERAL (
        SELECT m.seq FROM messages m
         WHERE m.partition_id = i.partition_id AND m.transaction_id = i.transaction_id
           AND hashtextextended(m.transaction_id, 0) = hashtextextended(i.transaction_id, 0) LIMIT 1
      ) twin ON i.checked
      LEFT JOIN LATERAL (
        SELECT s.due_at FROM scheduled_messages s
         WHERE s.partition_id = i.partition_id AND s.transaction_id = i.transaction_id
           AND hashtextextended(s.transaction_id, 0) = hashtextextended(i.transaction_id, 0) LIMIT 1
      ) waiting ON i.checked AND l.scheduled
     WHERE NOT (l.encryption_enabled AND i.key_id IS NULL)
  ), fitting AS MATERIALIZED (
    SELECT f.ord, f.partition_id, f.queue_id, f.due_at FROM (
      SELECT k.*, row_number() OVER (PARTITION BY k.queue_id ORDER BY k.ord) AS nth FROM looked k
       WHERE k.twin IS NULL AND k.twin_due_at IS NULL
    ) f WHERE room -> f.queue_id::text IS NULL OR f.nth <= (room ->> f.queue_id::text)::bigint
  ), numbered AS MATERIALIZED (
    SELECT f.ord, l.head + row_number() OVER (PARTITION BY f.partition_id ORDER BY f.ord) AS seq, l.created_at, l.queue_id
      FROM fitting f JOIN log l ON l.id = f.partition_id WHERE f.due_at IS NULL
  ), inserted AS (
    INSERT INTO messages
      (partition_id, seq, created_at, queue_id, transaction_id, trace_id, producer, key_id, payload, headers)
    SELECT i.partition_id, n.seq, n.created_at, n.queue_id, i.transaction_id, i.trace_id, i.producer, i.key_id, i.payload,
           i.headers
      FROM numbered n JOIN item i USING (ord) ORDER BY i.partition_id, n.seq
  ), scheduled AS (
    INSERT INTO scheduled_messages
      (due_at, partition_id, queue_id, pushed_at, transaction_id, trace_id, producer, key_id, headers, payload)
    SELECT f.due_at, f.partition_id, f.queue_id, t, i.transaction_id, i.trace_id, i.producer, i.key_id, i.headers, i.payload
      FROM fitting f JOIN item i USING (ord) WHERE f.due_at IS NOT NULL ORDER BY f.ord
  ), flagged AS (
    UPDATE partitions p SET scheduled = true, emptied_at = NULL
     WHERE NOT p.scheduled AND p.id IN (SELECT f.partition_id FROM fitting f WHERE f.due_at IS NOT NULL)
  ), counted AS (
    INSERT INTO tally_log (queue_id, group_id, pushed, consumed)
    SELECT n.queue_id, 0, count(*), 0 FROM numbered n GROUP BY 1
    UNION ALL SELECT f.queue_id, -1, 0, count(*) FROM fitting f WHERE f.due_at IS NOT NULL GROUP BY 1
  )
  SELECT array_agg(CASE WHEN k.twin IS NOT NULL THEN -k.twin WHEN k.twin_due_at IS NOT NULL THEN -LATER
                        WHEN k.ord IS NULL THEN NULL WHEN f.due_at IS NOT NULL THEN LATER ELSE coalesce(n.seq, 0) END
                   ORDER BY i.ord),
         array_agg(coalesce(k.twin_due_at, f.due_at) ORDER BY i.ord),
         array_agg(DISTINCT i.partition_id) FILTER (WHERE n.ord IS NOT NULL)
    INTO answers, dues, filled
    FROM item i LEFT JOIN looked k USING (ord) LEFT JOIN fitting f USING (ord) LEFT JOIN numbered n USING (ord);
  IF filled IS NOT NULL THEN PERFORM queue_wake(filled, t); END IF;
END $$;
