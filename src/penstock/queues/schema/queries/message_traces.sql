-- message_traces: the traces of a message, the oldest first.
-- $1 id of the partition, $2 transaction id
SELECT t.*, (SELECT array_agg(n.name ORDER BY n.name) FROM trace_names n WHERE n.trace_id = t.id) AS names
   FROM traces t JOIN messages m ON m.partition_id = t.partition_id AND m.seq = t.seq
  WHERE m.partition_id = $1 AND m.transaction_id = $2
    AND hashtextextended(m.transaction_id, 0) = hashtextextended($2, 0) ORDER BY t.at;
