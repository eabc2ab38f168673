-- message_uuid(installation, partition, seq): the id of a message; with seq 0 the id of the partition itself.
-- UUID version 8: 32 bits installation, 40 bits partition, 50 bits seq. Derived, so it costs no storage, and different
-- from the ids of every other database. The same in Python: penstock.queues.ids.
CREATE OR REPLACE FUNCTION message_uuid(installation bigint, partition_id bigint, seq bigint) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT (lpad(to_hex(installation), 8, '0')
       || lpad(to_hex(partition_id >> 24), 4, '0')
       || '8' || lpad(to_hex((partition_id >> 12) & 4095), 3, '0')
       || lpad(to_hex((2::bigint << 14) | ((partition_id & 4095) << 2) | (seq >> 48)), 4, '0')
       || lpad(to_hex(seq & 281474976710655), 12, '0'))::uuid
$$;
