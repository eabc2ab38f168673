-- groups: the groups of queues and where they start.
-- $1 group, $2 queue; NULL = all. $3 limit, NULL = none. $4, $5 only those after this queue and group
SELECT g.id, g.name, g.queue_id, q.name AS queue, g.mode, g.start_at, g.created_at, g.discovered < g.discover_to AS discovering
  FROM groups g JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL
 WHERE ($1::text IS NULL OR g.name = $1) AND ($2::text IS NULL OR q.name = $2)
   AND (q.name, g.name) > ($4::text, $5::text)
 ORDER BY q.name, g.name LIMIT $3::bigint;
