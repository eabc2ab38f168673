-- message: a message with its payload.
-- $1 id of the partition, $2 seq
SELECT m.*, p.name AS partition FROM messages m
   JOIN partitions p ON p.id = m.partition_id
  WHERE m.partition_id = $1 AND m.seq = $2;
