-- queues_by_figure: a page of the queues whose names contain $1, sorted by one of their counts. $2 at most so many, $3 after so
-- many. Figures.by_figure puts in the statement `figures` of all queues, and the count.
SELECT id FROM (figures) f
 WHERE strpos(lower(name), lower($1)) > 0
 GROUP BY id, name, namespace, task ORDER BY name LIMIT $2 OFFSET $3;
