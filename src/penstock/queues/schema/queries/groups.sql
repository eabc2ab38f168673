-- groups: every group of every queue and where it starts.
-- $1 group, $2 queue; NULL = all
SELECT g.id, g.name, g.queue_id, q.name AS queue, g.mode, g.start_at, g.created_at, g.discovered < g.discover_to AS discovering
  FROM groups g JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL
 WHERE ($1::text IS NULL OR g.name = $1) AND ($2::text IS NULL OR q.name = $2)
 ORDER BY q.name, g.name;
