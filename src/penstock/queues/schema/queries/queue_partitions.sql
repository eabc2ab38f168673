-- queue_partitions: a page of a queue's partitions, with how far a group is in each: the one that speaks for the queue.
-- $1 id of the queue, $2 id of the group (NULL = it has none), $3 limit, $4 offset
WITH page AS MATERIALIZED (
  SELECT p.* FROM partitions p WHERE p.queue_id = $1 ORDER BY p.queue_id, p.id LIMIT $3 OFFSET $4)
SELECT p.id, p.name, p.created_at, first.created_at AS oldest_message, last.created_at AS newest_message,
       coalesce(last.seq - first.seq + 1 - p.holes, 0) AS stored, queue_settled_count(c.cursor) AS settled,
       coalesce((c.cursor).consumed, 0) AS completed, coalesce((c.cursor).batches, 0) AS batches,
       (c.cursor).consumed_at AS consumed_at,
       (SELECT coalesce(sum(upper(r) - lower(r)), 0)::bigint FROM leases l, unnest(l.open) r
         WHERE l.partition_id = p.id AND l.group_id = $2 AND l.expires_at > clock_timestamp()) AS leased,
       (SELECT count(*) FROM dead_letters d WHERE d.partition_id = p.id) AS dead_letters
  FROM page p
  LEFT JOIN LATERAL (SELECT m.seq, m.created_at FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq LIMIT 1) first ON true
  LEFT JOIN LATERAL (SELECT m.seq, m.created_at FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq DESC LIMIT 1) last ON true
  LEFT JOIN LATERAL (SELECT c AS cursor FROM cursors c WHERE c.partition_id = p.id AND c.group_id = $2
                      ORDER BY c.version DESC LIMIT 1) c ON true
 ORDER BY p.id;
