-- outbox_stage: remember messages that this transaction will push when it commits (outbox_apply). Takes no lock that
-- anybody waits for: until then the messages are rows that only this transaction sees.
-- A NULL partition is 'Default'; if the queue is created by this, it has no order (ordering: none).
-- A NULL transaction id is made here, one per message; one that is given goes with a single message.
CREATE FUNCTION outbox_stage(
  p_queue text, p_payloads json[], p_partition text, p_transaction text, p_headers jsonb, p_delay double precision,
  p_deliver_at timestamptz, p_trace uuid
) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
  transactions text[]; headers bytea;
BEGIN
  PERFORM outbox_check();
  IF coalesce(length(p_queue), 0) NOT BETWEEN 1 AND 512 OR coalesce(length(p_partition), 1) NOT BETWEEN 1 AND 512 THEN
    RAISE invalid_parameter_value USING MESSAGE = 'a queue and a partition need names of 1 to 512 characters';
  END IF;
  IF EXISTS (SELECT 1 FROM queues q WHERE q.name = p_queue AND q.deleted_at IS NULL AND q.encryption_enabled) THEN
    RAISE EXCEPTION USING ERRCODE = 'PQ003', MESSAGE = format('queue "%s" is encrypted', p_queue),
      HINT = 'The database does not have the key. Push to this queue over HTTP.';
  END IF;
  IF p_delay IS NOT NULL AND p_deliver_at IS NOT NULL THEN
    RAISE invalid_parameter_value USING MESSAGE = 'give delay or deliver_at, not both';
  END IF;
  IF p_delay NOT BETWEEN 0 AND 315360000 OR NOT isfinite(p_deliver_at) THEN
    RAISE invalid_parameter_value USING MESSAGE = 'delay is 0 to 315360000 seconds (ten years), deliver_at a moment';
  END IF;
  headers := outbox_headers(p_headers);
  transactions := CASE WHEN p_transaction <> '' THEN ARRAY[p_transaction]
                       ELSE ARRAY(SELECT gen_random_uuid()::text FROM generate_subscripts(p_payloads, 1)) END;
  INSERT INTO outbox (xid, first, queue, partition, transaction_id, checked, trace_id, headers, delay, deliver_at, payload)
  SELECT pg_current_xact_id(), i.ord = 1 AND NOT EXISTS (SELECT 1 FROM outbox o WHERE o.xid = pg_current_xact_id()),
         p_queue, p_partition, i.transaction_id, p_transaction <> '' IS TRUE, p_trace, headers,
         p_delay, p_deliver_at,
         convert_to(coalesce(i.payload::text, 'null'), 'UTF8')
    FROM unnest(transactions, p_payloads) WITH ORDINALITY AS i (transaction_id, payload, ord) ORDER BY i.ord;
  RETURN transactions;
END $$;
