-- message: a message with its payload.
-- $1 id of the partition, $2 seq
SELECT m.*, p.name AS partition, q.name AS queue, q.id AS qid FROM messages m
   JOIN partitions p ON p.id = m.partition_id JOIN queues q ON q.id = m.queue_id
  WHERE m.partition_id = $1 AND m.seq = $2;
