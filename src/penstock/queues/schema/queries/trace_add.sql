-- trace_add: note something about a message.
-- $1 id of the partition, $2 transaction id, $3 group, $4 event type, $5 worker, $6 data, $7 names
WITH message AS (
  SELECT m.queue_id, m.partition_id, m.seq FROM message_named($1, $2) m
), trace AS (
  INSERT INTO traces (queue_id, partition_id, seq, group_name, event_type, worker, data)
  SELECT queue_id, partition_id, seq, $3, $4, $5, $6 FROM message RETURNING id, at
), named AS (
  INSERT INTO trace_names (name, at, trace_id) SELECT DISTINCT n, t.at, t.id FROM trace t, unnest($7::text[]) n
)
SELECT id FROM trace;
