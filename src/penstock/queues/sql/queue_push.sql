-- queue_push: append messages. The items' arrays are parallel, sorted by partition, and no (partition, transaction id)
-- occurs twice. p_ids are the distinct partitions in ascending order, p_starts how many items come before each one's first.
--   p_checks    whether the transaction id came from outside and so may be stored already
-- Answers one number per item:  n > 0 queued as n;  n < 0 a duplicate of message -n;  0 the queue is full (maxSize);
--   NULL the partition is gone, or the queue asks for encryption and the payload is clear: look it up again.
-- Locks the partitions by id; sequence numbers and times follow the last stored message. Wakes cursors that had nothing.
DROP FUNCTION IF EXISTS queue_push;
CREATE FUNCTION queue_push(
  p_ids bigint[], p_starts int[], p_partitions bigint[], p_transactions text[], p_checks boolean[], p_traces uuid[],
  p_producers text[], p_keys text[], p_payloads bytea[]
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  answers bigint[]; heads bigint[]; times timestamptz[]; queue_ids int[]; plain boolean; t timestamptz;
BEGIN
  SELECT count(*) = cardinality(p_ids) AND bool_and(q.max_size = 0 AND NOT q.encryption_enabled AND q.deleted_at IS NULL)
    INTO plain
    FROM (SELECT p.queue_id FROM partitions p WHERE p.id = ANY (p_ids) ORDER BY p.id FOR NO KEY UPDATE) p
    JOIN queues q ON q.id = p.queue_id;
  t := clock_timestamp();

  IF plain THEN
    plain := NOT EXISTS (
      SELECT 1 FROM unnest(p_partitions, p_transactions, p_checks) AS i (partition_id, transaction_id, checked)
       CROSS JOIN LATERAL (
         SELECT 1 FROM messages m WHERE m.partition_id = i.partition_id AND m.transaction_id = i.transaction_id
            AND hashtextextended(m.transaction_id, 0) = hashtextextended(i.transaction_id, 0) LIMIT 1) twin
       WHERE i.checked);
  END IF;
  IF NOT coalesce(plain, false) THEN
    RETURN queue_push_slowly(p_ids, p_partitions, p_transactions, p_checks, p_traces, p_producers, p_keys, p_payloads, t);
  END IF;

  SELECT array_agg(coalesce(last.seq, p.floor) ORDER BY p.id), array_agg(greatest(t, last.created_at) ORDER BY p.id),
         array_agg(p.queue_id ORDER BY p.id)
    INTO heads, times, queue_ids
    FROM partitions p
    LEFT JOIN LATERAL (SELECT m.seq, m.created_at FROM messages m WHERE m.partition_id = p.id
                        ORDER BY m.seq DESC LIMIT 1) last ON true
   WHERE p.id = ANY (p_ids);
  WITH log AS MATERIALIZED (
    SELECT * FROM unnest(p_ids, p_starts, heads, times, queue_ids) AS l (id, start, head, created_at, queue_id)
  ), inserted AS (
    INSERT INTO messages (partition_id, seq, created_at, queue_id, transaction_id, trace_id, producer, key_id, payload)
    SELECT i.partition_id, l.head + i.ord - l.start, l.created_at, l.queue_id, i.transaction_id, i.trace_id, i.producer,
           i.key_id, i.payload
      FROM unnest(p_partitions, p_transactions, p_traces, p_producers, p_keys, p_payloads) WITH ORDINALITY
             AS i (partition_id, transaction_id, trace_id, producer, key_id, payload, ord)
      JOIN log l ON l.id = i.partition_id
    RETURNING queue_id
  )
  INSERT INTO tally_log (queue_id, group_id, pushed) SELECT n.queue_id, 0, count(*) FROM inserted n GROUP BY 1;
  SELECT array_agg(l.head + i.ord - l.start ORDER BY i.ord) INTO answers
    FROM unnest(p_partitions) WITH ORDINALITY AS i (partition_id, ord)
    JOIN unnest(p_ids, p_starts, heads) AS l (id, start, head) ON l.id = i.partition_id;

  PERFORM queue_wake(p_ids, t);
  RETURN answers;
END $$;
