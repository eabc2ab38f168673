-- queue_partitions: a page of a queue's partitions, with how far its slowest group is in each.
-- $1 queue, $2 limit, $3 offset
WITH page AS MATERIALIZED (
  SELECT p.* FROM partitions p WHERE p.queue_id = (SELECT id FROM queues WHERE name = $1 AND deleted_at IS NULL)
   ORDER BY p.queue_id, p.id LIMIT $2 OFFSET $3)
SELECT p.id, p.name, p.created_at, p.holes, first.seq AS first, first.created_at AS oldest, last.seq AS last,
       last.created_at AS newest, coalesce(view.position, 0) AS position, coalesce(view.consumed, 0) AS consumed,
       coalesce(view.batches, 0) AS batches, view.consumed_at, coalesce(view.open, 0) AS open,
       coalesce(view.beyond, 0) AS beyond
  FROM page p
  LEFT JOIN LATERAL (SELECT m.seq, m.created_at FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq LIMIT 1) first ON true
  LEFT JOIN LATERAL (SELECT m.seq, m.created_at FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq DESC LIMIT 1) last ON true
  LEFT JOIN LATERAL (
    SELECT min(c.position) AS position, max(c.consumed) AS consumed, max(c.batches) AS batches, max(c.consumed_at) AS consumed_at,
           sum((SELECT sum(upper(r) - lower(r)) FROM unnest(c.leased) r))::bigint AS open,
           min((SELECT coalesce(sum(upper(r) - lower(r)), 0) FROM unnest(c.settled) r))::bigint AS beyond
      FROM cursors c WHERE c.partition_id = p.id) view ON true
 ORDER BY p.id;
