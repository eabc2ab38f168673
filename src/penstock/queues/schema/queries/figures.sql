-- figures: every queue and its groups with their counters, exact as of this snapshot. One row per (queue, group); a queue
-- without groups has one row with group_id NULL. Read from the counters and the live leases, never from messages.
-- docs/reference/queues.md (Counts) defines them. $1 ids of queues. Figures makes the statement for all queues of it, since one
-- for both has a plan that suits neither when there are many, and sorts the rows.
WITH counted AS MATERIALIZED (
  SELECT queue_id, group_id, sum(pushed)::bigint AS pushed, sum(removed)::bigint AS removed, sum(consumed)::bigint AS consumed,
         sum(done - dead - dropped)::bigint AS completed, sum(failed)::bigint AS failed,
         sum(dropped)::bigint AS dropped, sum(letters)::bigint AS letters
    FROM (SELECT queue_id, group_id, pushed, removed, consumed, done, failed, dead, dropped, letters FROM tallies
           WHERE queue_id = ANY ($1::int[])
          UNION ALL
          SELECT queue_id, group_id, pushed, removed, consumed, done, failed, dead, dropped, 0 FROM tally_log
           WHERE queue_id = ANY ($1::int[])
          UNION ALL
          SELECT queue_id, group_id, 0, 0, 0, 0, 0, 0, 0, letters FROM letter_log
           WHERE queue_id = ANY ($1::int[])) t
   GROUP BY 1, 2
), leased AS MATERIALIZED (
  SELECT l.queue_id, l.group_id, sum((SELECT sum(upper(r) - lower(r)) FROM unnest(l.open) r))::bigint AS open
    FROM leases l WHERE l.expires_at > clock_timestamp() AND l.queue_id = ANY ($1::int[]) GROUP BY 1, 2
)
SELECT q.id, q.name, q.namespace, q.task, g.id AS group_id, g.name AS group_name,
       coalesce(total.pushed, 0) AS pushed, coalesce(total.pushed - total.removed, 0) AS stored,
       coalesce(total.letters, 0) AS queue_letters, coalesce(later.consumed, 0) AS scheduled,
       coalesce(mine.consumed, 0) AS consumed, coalesce(mine.completed, 0) AS completed, coalesce(mine.failed, 0) AS failed,
       coalesce(mine.letters, 0) AS letters, coalesce(mine.dropped + mine.removed, 0) AS dropped, coalesce(leased.open, 0) AS leased
  FROM queues q
  LEFT JOIN counted total ON total.queue_id = q.id AND total.group_id = 0
  LEFT JOIN counted later ON later.queue_id = q.id AND later.group_id = -1
  LEFT JOIN groups g ON g.queue_id = q.id
  LEFT JOIN counted mine ON mine.group_id = g.id  -- a number that no other queue has a group of
  LEFT JOIN leased ON leased.group_id = g.id
 WHERE q.deleted_at IS NULL AND q.id = ANY ($1::int[])
