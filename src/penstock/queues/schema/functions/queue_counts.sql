-- queue_counts(queue): the queue's counters and those of its groups (group_id 0 = the queue, -1 = its
-- messages for later, as `consumed`), exact as of this snapshot:
-- what was rolled up plus what was logged since.
CREATE FUNCTION queue_counts(p_queue int)
RETURNS TABLE (queue_id int, group_id int, pushed bigint, removed bigint, consumed bigint, done bigint,
               failed bigint, dead bigint, dropped bigint)
LANGUAGE sql STABLE AS $$
  SELECT p_queue, t.group_id, sum(t.pushed)::bigint, sum(t.removed)::bigint, sum(t.consumed)::bigint,
         sum(t.done)::bigint, sum(t.failed)::bigint, sum(t.dead)::bigint, sum(t.dropped)::bigint
    FROM (SELECT group_id, pushed, removed, consumed, done, failed, dead, dropped FROM tallies WHERE queue_id = p_queue
          UNION ALL
          SELECT group_id, pushed, removed, consumed, done, failed, dead, dropped FROM tally_log WHERE queue_id = p_queue) t
   GROUP BY t.group_id
$$;
