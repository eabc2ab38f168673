-- message_progress: what the groups of a queue did with a message, all together; p_queue_mode is the name of queue mode.
-- The planner puts it into the query that uses it.
CREATE FUNCTION message_progress(p_queue int, p_partition bigint, p_seq bigint, p_queue_mode text)
RETURNS TABLE (groups bigint, groups_done bigint, queue_done boolean, queue_leased boolean, any_leased boolean,
               lease_expires_at timestamptz, has_queue_mode boolean, dead boolean)
LANGUAGE sql STABLE AS $$
  SELECT count(*) FILTER (WHERE g.name <> p_queue_mode),
         count(*) FILTER (WHERE g.name <> p_queue_mode AND (c.position >= p_seq OR c.settled @> p_seq)),
         bool_or(c.position >= p_seq OR c.settled @> p_seq) FILTER (WHERE g.name = p_queue_mode),
         bool_or(c.leased @> p_seq AND c.next_expiry > clock_timestamp()) FILTER (WHERE g.name = p_queue_mode),
         bool_or(c.leased @> p_seq AND c.next_expiry > clock_timestamp()),
         max(c.next_expiry) FILTER (WHERE c.leased @> p_seq),
         count(*) FILTER (WHERE g.name = p_queue_mode) > 0,
         EXISTS (SELECT 1 FROM dead_letters d WHERE d.partition_id = p_partition AND d.seq = p_seq)
    FROM groups g LEFT JOIN LATERAL (SELECT * FROM cursors c WHERE c.partition_id = p_partition AND c.group_id = g.id
                                      ORDER BY c.version DESC LIMIT 1) c ON true
   WHERE g.queue_id = p_queue
$$;
