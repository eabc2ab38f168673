-- message_groups: what each group did with a message.
-- $1 id of the partition, $2 seq, $3 id of the queue
SELECT g.name, c.position >= $2 OR c.settled @> $2 AS consumed, c.leased @> $2 AND c.next_expiry > clock_timestamp() AS leased,
        c.next_expiry, a.attempts, a.error AS attempt_error, d.error, d.attempts AS dead_attempts
   FROM groups g
   LEFT JOIN LATERAL (SELECT * FROM cursors c WHERE c.partition_id = $1 AND c.group_id = g.id
                       ORDER BY c.version DESC LIMIT 1) c ON true
   LEFT JOIN attempts a ON a.partition_id = $1 AND a.group_id = g.id AND a.seq = $2
   LEFT JOIN LATERAL (SELECT d.error, d.attempts FROM dead_letters d WHERE d.partition_id = $1 AND d.seq = $2
                         AND d.group_id = g.id ORDER BY d.id DESC LIMIT 1) d ON true
  WHERE g.queue_id = $3 ORDER BY g.name;
