-- queue_partition_lag: a partition as a group sees it: how many messages it has not finished with, since when the oldest of
-- them waits, its live lease. Sequence numbers stand for messages. The planner puts it into the query that uses it.
CREATE FUNCTION queue_partition_lag(p_group int, p_partition bigint)
RETURNS TABLE ("group" text, queue text, partition text, partition_id bigint, lease_id uuid, lag bigint,
               lag_seconds double precision, oldest timestamptz, consumed bigint, consumed_at timestamptz)
LANGUAGE sql STABLE AS $$
  SELECT g.name, q.name, p.name, p.id, CASE WHEN c.next_expiry > clock_timestamp() AND NOT isempty(c.leased) THEN c.lease_id END,
         greatest(0, coalesce(head.seq, p.floor) - greatest(c.position, coalesce(first.seq - 1, p.floor))
                     - coalesce((SELECT sum(upper(r) - lower(r)) FROM unnest(c.settled) r), 0)::bigint),
         greatest(0, extract(epoch FROM clock_timestamp() - open.created_at))::double precision, open.created_at,
         c.consumed, c.consumed_at
    FROM groups g JOIN queues q ON q.id = g.queue_id
    JOIN partitions p ON p.id = p_partition
    JOIN LATERAL (SELECT * FROM cursors c WHERE c.partition_id = p.id AND c.group_id = g.id
                   ORDER BY c.version DESC LIMIT 1) c ON true
    LEFT JOIN LATERAL (SELECT m.seq FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq DESC LIMIT 1) head ON true
    LEFT JOIN LATERAL (SELECT m.seq FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq LIMIT 1) first ON true
    LEFT JOIN LATERAL (SELECT m.created_at FROM messages m WHERE m.partition_id = p.id AND m.seq > c.position
                        ORDER BY m.seq LIMIT 1) open ON true
   WHERE g.id = p_group
$$;
