-- queues: queues as configured, the newest first.
-- $1 queue, $2 namespace, $3 task; NULL = all. $4 only those before this id; NULL = from the newest. $5 at most so many, $6 after
-- so many
SELECT q.* FROM queues q
 WHERE q.deleted_at IS NULL AND ($1::text IS NULL OR q.name = $1)
   AND ($2::text IS NULL OR q.namespace = $2) AND ($3::text IS NULL OR q.task = $3)
   AND q.id < coalesce($4::int, 2147483647)
 ORDER BY q.id DESC LIMIT $5 OFFSET $6;
