-- message_traces: the traces of a message, the oldest first.
-- $1 id of the partition, $2 transaction id
SELECT t.*, (SELECT array_agg(n.name ORDER BY n.name) FROM trace_names n WHERE n.trace_id = t.id) AS names
  FROM message_named($1, $2) m JOIN traces t ON t.partition_id = m.partition_id AND t.seq = m.seq ORDER BY t.at;
