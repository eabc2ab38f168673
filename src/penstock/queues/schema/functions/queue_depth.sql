-- queue_depth(queue): stored messages that the slowest group has not settled; without groups, all stored messages. And those
-- for later, so that there is room for them when they are due.
CREATE FUNCTION queue_depth(p_queue int) RETURNS bigint LANGUAGE sql STABLE AS $$
  WITH counted AS MATERIALIZED (SELECT * FROM queue_counts(p_queue))
  SELECT coalesce((SELECT pushed - removed FROM counted WHERE group_id = 0), 0)
       - coalesce((SELECT min(coalesce(c.consumed, 0)) FROM groups g LEFT JOIN counted c ON c.group_id = g.id
                    WHERE g.queue_id = p_queue), 0)
       + coalesce((SELECT consumed FROM counted WHERE group_id = -1), 0)
$$;
