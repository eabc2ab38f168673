-- queues: every queue with its counts, the newest first.
-- $1 the group of queue mode ('__QUEUE_MODE__'), $2 queue, $3 namespace, $4 task; NULL = all
WITH counted AS MATERIALIZED (
  SELECT queue_id, group_id, sum(pushed)::bigint AS pushed, sum(removed)::bigint AS removed, sum(consumed)::bigint AS consumed,
         sum(done)::bigint AS done, sum(failed)::bigint AS failed, sum(dead)::bigint AS dead, sum(dropped)::bigint AS dropped
    FROM (SELECT queue_id, group_id, pushed, removed, consumed, done, failed, dead, dropped FROM tallies
          UNION ALL SELECT queue_id, group_id, pushed, removed, consumed, done, failed, dead, dropped FROM tally_log) t
   GROUP BY 1, 2
), held AS (
  SELECT l.queue_id, sum((SELECT sum(upper(r) - lower(r)) FROM unnest(l.open) r))::bigint AS open,
         count(*) AS leases FROM leases l WHERE l.expires_at > clock_timestamp() GROUP BY 1
)
SELECT q.*, coalesce(total.pushed, 0) - coalesce(total.removed, 0) AS stored, coalesce(total.pushed, 0) AS pushed,
       coalesce(held.open, 0) AS processing, coalesce(held.leases, 0) AS leases,
       coalesce(own.consumed, slowest.consumed, 0) AS consumed, coalesce(slowest.failed, 0) AS failed,
       coalesce(slowest.dead, 0) AS dead, coalesce(slowest.dropped, 0) AS dropped, coalesce(slowest.done, 0) AS done
  FROM queues q
  LEFT JOIN counted total ON total.queue_id = q.id AND total.group_id = 0
  LEFT JOIN held ON held.queue_id = q.id
  LEFT JOIN groups g ON g.queue_id = q.id AND g.name = $1
  LEFT JOIN LATERAL (SELECT coalesce(c.consumed, 0) AS consumed FROM (SELECT 1) one
                       LEFT JOIN counted c ON c.queue_id = q.id AND c.group_id = g.id WHERE g.id IS NOT NULL) own ON true
  LEFT JOIN LATERAL (SELECT min(coalesce(c.consumed, 0)) AS consumed, sum(c.failed)::bigint AS failed, sum(c.dead)::bigint AS dead,
                            sum(c.dropped)::bigint AS dropped, sum(c.done)::bigint AS done
                       FROM groups x LEFT JOIN counted c ON c.group_id = x.id AND c.queue_id = q.id
                      WHERE x.queue_id = q.id) slowest ON true
 WHERE q.deleted_at IS NULL AND ($2::text IS NULL OR q.name = $2)
   AND ($3::text IS NULL OR q.namespace = $3) AND ($4::text IS NULL OR q.task = $4)
 ORDER BY q.created_at DESC, q.id DESC;
