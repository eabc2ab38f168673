-- Headers of a message: a JSON object of strings as text, sealed like the payload when key_id is set. NULL = none, which
-- takes no room in a row.
ALTER TABLE messages ADD COLUMN headers bytea;
ALTER TABLE dead_letters ADD COLUMN headers bytea;

CREATE OR REPLACE VIEW queue_messages AS
SELECT q.name AS queue, p.name AS partition, m.seq,
       message_uuid(i.id, m.partition_id, m.seq) AS id, message_uuid(i.id, m.partition_id, 0) AS partition_id,
       m.transaction_id, m.trace_id, m.producer, m.created_at, m.xid, m.key_id,
       CASE WHEN m.key_id IS NULL THEN convert_from(m.payload, 'UTF8')::jsonb END AS payload,
       CASE WHEN m.key_id IS NULL THEN convert_from(m.headers, 'UTF8')::jsonb END AS headers
  FROM messages m JOIN partitions p ON p.id = m.partition_id JOIN queues q ON q.id = m.queue_id CROSS JOIN installation i
 WHERE q.deleted_at IS NULL;
