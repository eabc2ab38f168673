-- message: a message with its payload, and what groups did with it.
-- $1 id of the partition, $2 seq, $3 the group of queue mode
SELECT m.*, p.name AS partition, view.* FROM messages m
   JOIN partitions p ON p.id = m.partition_id
  CROSS JOIN LATERAL message_progress(m.queue_id, m.partition_id, m.seq, $3) view
  WHERE m.partition_id = $1 AND m.seq = $2;
