-- oldest_messages: how long ago the oldest stored message of each queue was pushed. In the order of transactions, so times may
-- be off by as long as one took. $1 ids of queues
SELECT q.id, extract(epoch FROM clock_timestamp() - m.created_at)::float8 AS seconds
  FROM unnest($1::int[]) q (id)
 CROSS JOIN LATERAL (SELECT m.created_at FROM messages m WHERE m.queue_id = q.id ORDER BY m.xid LIMIT 1) m;
