-- outbox_stage_ack: remember that this transaction will acknowledge a message when it commits. A lease that is lost
-- already is an error here, one that is lost until then at the commit. Takes no lock that anybody waits for.
CREATE FUNCTION outbox_stage_ack(
  p_partition uuid, p_transaction text, p_lease uuid, p_group text, p_status text, p_error text
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  digits text := replace(p_partition::text, '-', ''); number bigint;
BEGIN
  PERFORM outbox_check();
  IF p_partition IS NULL OR p_transaction IS NULL OR p_lease IS NULL OR p_group IS NULL THEN
    RAISE invalid_parameter_value USING MESSAGE = 'an acknowledgement needs the partition, transaction id and lease of its message',
      HINT = 'A message taken with autoAck has no lease: it is acknowledged already.';
  END IF;
  IF p_status NOT IN ('completed', 'failed', 'retry', 'dlq') OR p_status IS NULL THEN
    RAISE invalid_parameter_value USING MESSAGE = format('unknown status "%s"', p_status),
      HINT = 'It is completed, failed, retry or dlq.';
  END IF;
  -- see message_uuid: 40 bits of a partition's id are its number
  number := ('x' || substr(digits, 9, 4) || substr(digits, 14, 3))::bit(28)::bigint << 12
            | (('x' || substr(digits, 17, 4))::bit(16)::bigint >> 2 & 4095);
  IF p_partition IS DISTINCT FROM (SELECT message_uuid(i.id, number, 0) FROM installation i) THEN
    RAISE invalid_parameter_value USING MESSAGE = format('%s is no partition of this database', p_partition),
      HINT = 'The outbox works on the database that the brokers of the queue use.';
  END IF;
  IF NOT EXISTS (
    SELECT 1 FROM leases l JOIN groups g ON g.id = l.group_id
     WHERE l.lease_id = p_lease AND l.partition_id = number AND g.name = p_group AND l.expires_at > clock_timestamp())
  THEN
    PERFORM outbox_lease_lost(p_transaction);
  END IF;
  INSERT INTO outbox (xid, first, transaction_id, partition_id, group_name, lease_id, status, error)
  VALUES (pg_current_xact_id(), NOT EXISTS (SELECT 1 FROM outbox o WHERE o.xid = pg_current_xact_id()),
          p_transaction, number, p_group, p_lease, p_status, left(p_error, 10000));
END $$;
CREATE FUNCTION outbox_lease_lost(p_transaction text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION USING ERRCODE = 'PQ001', MESSAGE = format('the lease of message "%s" is lost', p_transaction),
    HINT = 'It expired, or the message was answered before. Nothing of this transaction may be committed; '
           'the message is delivered again if it is not done.';
END $$;
