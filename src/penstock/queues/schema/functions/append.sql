-- append: store messages at the end of their partitions.
--
-- The items are sorted by partition, and no transaction id occurs twice in one. The arrays of items are parallel:
--   p_ids, p_starts      the partitions, each once and ascending, and how many items come before the first item of each
--   p_transactions       the transaction id of each item, unique in its partition
--   p_checked            true: an id came from outside, so that a stored message may have it. Look them up
--   p_traces, p_producers, p_keys    NULL: no item has one. A key is the id of the key that encrypted payload and headers
--   p_payloads, p_payload_bounds     all payloads one after the other; item n is what lies from bound n to bound n + 1 (the
--                        first byte is 1). Encoding and decoding an array of strings costs more than the bytes do
--   p_headers, p_header_bounds       the same; an item without headers has no bytes. NULL: no item has headers
--   p_due_ats, p_delays  deliver the item at this moment, or in so many seconds. NULL: now
-- Returns one row of parallel arrays:
--   seqs      the number that each item got, or the number of the stored message that it repeats; otherwise NULL
--   statuses  NULL: every item was queued. Otherwise queued; duplicate; full (maxSize); scheduled (kept apart until it is due);
--             stale (the partition is gone, or its queue asks for encryption and the item is clear: look it up again)
--   due_ats   NULL, or when each scheduled item, or the scheduled message that an item repeats, is due
--
-- Locks the partitions by id: numbers and times follow the last stored message, and a push updates no row. A queue with
-- maxSize is locked too, so that its count is exact; a scheduled item takes room from now on. Wakes the cursors that rest.
-- Planned once per session: planning for the arrays of each call would cost more than running it (docs/decisions/queues.md).
CREATE FUNCTION append(
  p_ids bigint[], p_starts int[], p_transactions text[], p_checked boolean, p_traces uuid[], p_producers text[],
  p_keys text[], p_payloads bytea, p_payload_bounds int[], p_headers bytea DEFAULT NULL, p_header_bounds int[] DEFAULT NULL,
  p_due_ats timestamptz[] DEFAULT NULL, p_delays double precision[] DEFAULT NULL,
  OUT seqs bigint[], OUT statuses text[], OUT due_ats timestamptz[]
) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  total int := cardinality(p_transactions); t timestamptz; simple boolean;
  with_scheduled boolean; competing boolean; limited int[]; room jsonb := '{}'; resting boolean; filled bigint[];
BEGIN
  SELECT count(*) = cardinality(p_ids) AND bool_and(q.deleted_at IS NULL AND q.max_size = 0 AND NOT q.encryption_enabled),
         bool_or(p.scheduled), bool_or(q.competing), array_agg(DISTINCT q.id) FILTER (WHERE q.max_size > 0)
    INTO simple, with_scheduled, competing, limited
    FROM (SELECT p.queue_id, p.scheduled FROM partitions p WHERE p.id = ANY (p_ids) ORDER BY p.id FOR NO KEY UPDATE) p
    JOIN queues q ON q.id = p.queue_id;
  t := clock_timestamp();
  simple := simple AND p_due_ats IS NULL AND p_delays IS NULL;
  IF simple AND p_checked THEN
    simple := NOT EXISTS (
      SELECT 1 FROM (SELECT l.id, generate_series(l.start + 1, coalesce(l.stop, total)) AS n
                       FROM unnest(p_ids, p_starts, p_starts[2:]) l (id, start, stop)) i
       CROSS JOIN LATERAL message_named(i.id, p_transactions[i.n]));
  END IF;

  -- The common case: every item is new and is queued now.
  IF simple AND NOT (p_checked AND with_scheduled) THEN
    WITH log AS MATERIALIZED (
      SELECT l.id, l.start, coalesce(l.stop, total) AS stop, p.queue_id, coalesce(last.seq, p.floor) AS head,
             greatest(t, last.created_at) AS created_at
        FROM unnest(p_ids, p_starts, p_starts[2:]) l (id, start, stop)
        JOIN partitions p ON p.id = l.id
        LEFT JOIN LATERAL (SELECT m.seq, m.created_at FROM messages m WHERE m.partition_id = p.id
                            ORDER BY m.seq DESC LIMIT 1) last ON true
    ), queued AS (
      INSERT INTO messages (partition_id, seq, created_at, queue_id, transaction_id, trace_id, producer, key_id, payload, headers)
      SELECT i.id, i.head + i.n - i.start, i.created_at, i.queue_id, p_transactions[i.n], p_traces[i.n], p_producers[i.n],
             p_keys[i.n], bytes_between(p_payloads, p_payload_bounds, i.n),
             nullif(bytes_between(p_headers, p_header_bounds, i.n), '')
        FROM (SELECT l.*, generate_series(l.start + 1, l.stop) AS n FROM log l) i
    ), counted AS (
      INSERT INTO tally_log (queue_id, group_id, pushed) SELECT l.queue_id, 0, sum(l.stop - l.start) FROM log l GROUP BY 1
    )
    SELECT ARRAY(SELECT l.head + generate_series(1, l.stop - l.start) FROM (SELECT * FROM log ORDER BY id) l),
           bool_or(EXISTS (
             SELECT 1 FROM groups g
              CROSS JOIN LATERAL (SELECT c.due_at FROM cursors c WHERE c.partition_id = l.id AND c.group_id = g.id
                                   ORDER BY c.version DESC LIMIT 1) c
              WHERE g.queue_id = l.queue_id AND (c.due_at IS NULL OR competing AND c.due_at > t)))
      INTO seqs, resting
      FROM log l;
    IF resting THEN PERFORM queue_wake(p_ids, t); END IF;
    RETURN;
  END IF;

  IF limited IS NOT NULL THEN
    PERFORM 1 FROM queues q WHERE q.id = ANY (limited) ORDER BY q.id FOR NO KEY UPDATE;
    SELECT jsonb_object_agg(q.id, q.max_size - queue_depth(q.id)) INTO room FROM queues q WHERE q.id = ANY (limited);
  END IF;
  WITH log AS MATERIALIZED (
    SELECT l.id, l.start, coalesce(l.stop, total) AS stop, q.id AS queue_id, p.scheduled AS has_scheduled,
           q.encryption_enabled AS encrypted, (room ->> q.id::text)::bigint AS room,
           coalesce(last.seq, p.floor) AS head, greatest(t, last.created_at) AS created_at
      FROM unnest(p_ids, p_starts, p_starts[2:]) l (id, start, stop)
      LEFT JOIN partitions p ON p.id = l.id
      LEFT JOIN queues q ON q.id = p.queue_id AND q.deleted_at IS NULL
      LEFT JOIN LATERAL (SELECT m.seq, m.created_at FROM messages m WHERE m.partition_id = p.id
                          ORDER BY m.seq DESC LIMIT 1) last ON true
  ), item AS (
    SELECT l.*, i.n, coalesce(p_due_ats[i.n], t + make_interval(secs => p_delays[i.n])) AS due_at,
           stored.seq AS stored_seq, waiting.due_at AS waiting_due_at,
           stored.seq IS NULL AND waiting.due_at IS NULL AS is_new,
           l.queue_id IS NULL OR l.encrypted AND p_keys[i.n] IS NULL AS is_stale
      FROM log l
     CROSS JOIN LATERAL generate_series(l.start + 1, l.stop) i (n)
      LEFT JOIN LATERAL message_named(l.id, p_transactions[i.n]) stored ON p_checked
      LEFT JOIN LATERAL (
        SELECT s.due_at FROM scheduled_messages s WHERE s.partition_id = l.id AND s.transaction_id = p_transactions[i.n]
           AND hashtextextended(s.transaction_id, 0) = hashtextextended(p_transactions[i.n], 0) LIMIT 1
      ) waiting ON p_checked AND l.has_scheduled
  ), judged AS (
    SELECT i.*, CASE WHEN i.is_stale THEN 'stale' WHEN NOT i.is_new THEN 'duplicate'
                     WHEN i.room < count(*) FILTER (WHERE i.is_new AND NOT i.is_stale) OVER (PARTITION BY i.queue_id ORDER BY i.n) THEN 'full'
                     WHEN i.due_at IS NOT NULL THEN 'scheduled' ELSE 'queued' END AS status
      FROM item i
  ), numbered AS MATERIALIZED (
    SELECT j.*, CASE WHEN j.status = 'queued'
                     THEN j.head + count(*) FILTER (WHERE j.status = 'queued') OVER (PARTITION BY j.id ORDER BY j.n)
                     ELSE j.stored_seq END AS seq
      FROM judged j
  ), queued AS (
    INSERT INTO messages (partition_id, seq, created_at, queue_id, transaction_id, trace_id, producer, key_id, payload, headers)
    SELECT i.id, i.seq, i.created_at, i.queue_id, p_transactions[i.n], p_traces[i.n], p_producers[i.n], p_keys[i.n],
           bytes_between(p_payloads, p_payload_bounds, i.n), nullif(bytes_between(p_headers, p_header_bounds, i.n), '')
      FROM numbered i WHERE i.status = 'queued'
  ), scheduled AS (
    INSERT INTO scheduled_messages
      (due_at, partition_id, queue_id, pushed_at, transaction_id, trace_id, producer, key_id, headers, payload)
    SELECT i.due_at, i.id, i.queue_id, t, p_transactions[i.n], p_traces[i.n], p_producers[i.n], p_keys[i.n],
           nullif(bytes_between(p_headers, p_header_bounds, i.n), ''), bytes_between(p_payloads, p_payload_bounds, i.n)
      FROM numbered i WHERE i.status = 'scheduled' ORDER BY i.n
  ), flagged AS (
    UPDATE partitions p SET scheduled = true, emptied_at = NULL
     WHERE NOT p.scheduled AND p.id IN (SELECT i.id FROM numbered i WHERE i.status = 'scheduled')
  ), counted AS (
    INSERT INTO tally_log (queue_id, group_id, pushed, consumed)
    SELECT i.queue_id, CASE i.status WHEN 'queued' THEN 0 ELSE -1 END, count(*) FILTER (WHERE i.status = 'queued'),
           count(*) FILTER (WHERE i.status = 'scheduled')
      FROM numbered i WHERE i.status IN ('queued', 'scheduled') GROUP BY 1, 2
  )
  SELECT array_agg(i.seq ORDER BY i.n), CASE WHEN bool_or(i.status <> 'queued') THEN array_agg(i.status ORDER BY i.n) END,
         array_agg(CASE i.status WHEN 'scheduled' THEN i.due_at ELSE i.waiting_due_at END ORDER BY i.n),
         array_agg(DISTINCT i.id) FILTER (WHERE i.status = 'queued')
    INTO seqs, statuses, due_ats, filled
    FROM numbered i;
  IF filled IS NOT NULL THEN PERFORM queue_wake(filled, t); END IF;
END $$;
