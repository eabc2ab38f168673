-- queues: every queue as configured, the newest first.
-- $1 queue, $2 namespace, $3 task; NULL = all
SELECT q.* FROM queues q
 WHERE q.deleted_at IS NULL AND ($1::text IS NULL OR q.name = $1)
   AND ($2::text IS NULL OR q.namespace = $2) AND ($3::text IS NULL OR q.task = $3)
 ORDER BY q.created_at DESC, q.id DESC;
