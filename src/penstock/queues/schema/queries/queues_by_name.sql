-- queues_by_name: a page of the queues whose names contain $1. $2 only names after this one; NULL = from the first. $3 at most so
-- many, $4 after so many. Figures.by_name turns the order round.
SELECT q.id, q.name FROM queues q
 WHERE q.deleted_at IS NULL AND strpos(lower(q.name), lower($1)) > 0 AND ($2::text IS NULL OR q.name > $2)
 ORDER BY q.name LIMIT $3 OFFSET $4;
