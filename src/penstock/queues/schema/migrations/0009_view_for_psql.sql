-- What people use who look with psql. It belongs to no release, so it is here and not beside the functions of one:
-- message_uuid says how an id is made, for ever; the view may only gain columns, at its end.

-- message_uuid(installation, partition, seq): the id of a message; with seq 0 the id of the partition itself.
-- UUID version 8: 32 bits installation, 40 bits partition, 50 bits seq. Derived, so it costs no storage, and different
-- from the ids of every other database. The same in Python: penstock.protocol.message_ids.
CREATE OR REPLACE FUNCTION message_uuid(installation bigint, partition_id bigint, seq bigint) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT (lpad(to_hex(installation), 8, '0')
       || lpad(to_hex(partition_id >> 24), 4, '0')
       || '8' || lpad(to_hex((partition_id >> 12) & 4095), 3, '0')
       || lpad(to_hex((2::bigint << 14) | ((partition_id & 4095) << 2) | (seq >> 48)), 4, '0')
       || lpad(to_hex(seq & 281474976710655), 12, '0'))::uuid
$$;

-- queue_messages: payload as jsonb; NULL for encrypted ones.
CREATE OR REPLACE VIEW queue_messages AS
SELECT q.name AS queue, p.name AS partition, m.seq,
       message_uuid(i.id, m.partition_id, m.seq) AS id, message_uuid(i.id, m.partition_id, 0) AS partition_id,
       m.transaction_id, m.trace_id, m.producer, m.created_at, m.xid, m.key_id,
       CASE WHEN m.key_id IS NULL THEN convert_from(m.payload, 'UTF8')::jsonb END AS payload
  FROM messages m JOIN partitions p ON p.id = m.partition_id JOIN queues q ON q.id = m.queue_id CROSS JOIN installation i
 WHERE q.deleted_at IS NULL;
