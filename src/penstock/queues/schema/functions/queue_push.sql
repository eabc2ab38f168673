-- queue_push: append messages. The items' arrays are parallel, sorted by partition, and no (partition, transaction id)
-- occurs twice. p_ids are the distinct partitions in ascending order, p_starts how many items come before each one's first.
--   p_checks    whether the transaction id came from outside and so may be stored already: one per item, or one for all
--   p_traces, p_producers, p_keys    NULL = none has one
--   p_payloads, p_headers    of all items, one after the other, with where each begins and the last one ends (from 1): n + 1
--                            numbers. Encoding and decoding arrays of bytes cost the broker and us more than the bytes do.
--                            An item without headers has no bytes there; NULL = none has any
--   p_dues, p_delays    when an item is due: a moment, or seconds from now; NULL = now. Those for later are kept apart
--                       (scheduled_messages) until then
-- Answers `heads` when all items were queued: item n of the call, in partition k, got the number heads[k] + n (n from 0).
-- Otherwise `heads` is NULL and `answers` has one number per item:  n > 0 queued as n;  n < 0 a duplicate of message -n;
--   0 the queue is full (maxSize);  NULL the partition is gone, or the queue asks for encryption and the payload is clear:
--   look it up again;  2^60 kept for later, -2^60 a duplicate of one that is, both with its due time in `dues` (or `dues` is NULL).
-- Locks the partitions by id; sequence numbers and times follow the last stored message. Wakes cursors that had nothing.
-- Planned once per session: planning it for each call's arrays would cost more than running it.
CREATE FUNCTION queue_push(
  p_ids bigint[], p_starts int[], p_transactions text[], p_checks boolean[], p_traces uuid[], p_producers text[],
  p_keys text[], p_payloads bytea, p_payload_bounds int[], p_headers bytea DEFAULT NULL, p_header_bounds int[] DEFAULT NULL,
  p_dues timestamptz[] DEFAULT NULL, p_delays double precision[] DEFAULT NULL, OUT heads bigint[], OUT answers bigint[], OUT dues timestamptz[]
) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  plain boolean; competing boolean; scheduled boolean; resting boolean; t timestamptz;
BEGIN
  SELECT count(*) = cardinality(p_ids) AND bool_and(q.max_size = 0 AND NOT q.encryption_enabled AND q.deleted_at IS NULL),
         bool_or(q.competing), bool_or(p.scheduled)
    INTO plain, competing, scheduled
    FROM (SELECT p.queue_id, p.scheduled FROM partitions p WHERE p.id = ANY (p_ids) ORDER BY p.id FOR NO KEY UPDATE) p
    JOIN queues q ON q.id = p.queue_id;
  t := clock_timestamp();

  IF plain AND true = ANY (p_checks) THEN
    plain := NOT EXISTS (
      SELECT 1 FROM (SELECT l.id, generate_series(l.start + 1, coalesce(l.stop, cardinality(p_transactions))) AS n
                       FROM unnest(p_ids, p_starts, p_starts[2:]) AS l (id, start, stop)) i
       CROSS JOIN LATERAL (
         SELECT 1 FROM messages m WHERE m.partition_id = i.id AND m.transaction_id = p_transactions[i.n]
            AND hashtextextended(m.transaction_id, 0) = hashtextextended(p_transactions[i.n], 0) LIMIT 1) twin
       WHERE p_checks[least(i.n, cardinality(p_checks))]);
  END IF;
  IF plain AND scheduled AND true = ANY (p_checks) THEN
    plain := NOT EXISTS (
      SELECT 1 FROM (SELECT l.id, generate_series(l.start + 1, coalesce(l.stop, cardinality(p_transactions))) AS n
                       FROM unnest(p_ids, p_starts, p_starts[2:]) AS l (id, start, stop)) i
       CROSS JOIN LATERAL (
         SELECT 1 FROM scheduled_messages s WHERE s.partition_id = i.id AND s.transaction_id = p_transactions[i.n]
            AND hashtextextended(s.transaction_id, 0) = hashtextextended(p_transactions[i.n], 0) LIMIT 1) twin
       WHERE p_checks[least(i.n, cardinality(p_checks))]);
  END IF;
  IF p_dues IS NOT NULL OR p_delays IS NOT NULL OR NOT coalesce(plain, false) THEN
    SELECT s.answers, s.dues INTO answers, dues
      FROM queue_push_slowly(p_ids, p_starts, p_transactions, p_checks, p_traces, p_producers, p_keys, p_payloads,
                             p_payload_bounds, p_headers, p_header_bounds, p_dues, p_delays, t) s;
    RETURN;
  END IF;

  WITH log AS MATERIALIZED (
    SELECT l.*, coalesce(l.stop, cardinality(p_transactions)) AS until, p.queue_id,
           coalesce(last.seq, p.floor) + 1 - l.start AS head, greatest(t, last.created_at) AS created_at
      FROM unnest(p_ids, p_starts, p_starts[2:]) WITH ORDINALITY AS l (id, start, stop, place)
      JOIN partitions p ON p.id = l.id
      LEFT JOIN LATERAL (SELECT m.seq, m.created_at FROM messages m WHERE m.partition_id = p.id
                          ORDER BY m.seq DESC LIMIT 1) last ON true
  ), inserted AS (
    INSERT INTO messages (partition_id, seq, created_at, queue_id, transaction_id, trace_id, producer, key_id, payload, headers)
    SELECT i.id, i.head + i.n - 1, i.created_at, i.queue_id, p_transactions[i.n], p_traces[i.n],
           p_producers[i.n], p_keys[i.n],
           substring(p_payloads FROM p_payload_bounds[i.n] FOR p_payload_bounds[i.n + 1] - p_payload_bounds[i.n]),
           CASE WHEN p_header_bounds[i.n + 1] > p_header_bounds[i.n]
                THEN substring(p_headers FROM p_header_bounds[i.n] FOR p_header_bounds[i.n + 1] - p_header_bounds[i.n]) END
      FROM (SELECT l.*, generate_series(l.start + 1, l.until) AS n FROM log l) i
  ), counted AS (
    INSERT INTO tally_log (queue_id, group_id, pushed) SELECT l.queue_id, 0, sum(l.until - l.start) FROM log l GROUP BY 1
  )
  SELECT array_agg(l.head ORDER BY l.place),
         bool_or(EXISTS (
           SELECT 1 FROM groups g
            CROSS JOIN LATERAL (SELECT c.due_at FROM cursors c WHERE c.partition_id = l.id AND c.group_id = g.id
                                 ORDER BY c.version DESC LIMIT 1) c
            WHERE g.queue_id = l.queue_id AND (c.due_at IS NULL OR competing AND c.due_at > t)))
    INTO heads, resting
    FROM log l;
  IF resting THEN
    PERFORM queue_wake(p_ids, t);
  END IF;
END $$;
