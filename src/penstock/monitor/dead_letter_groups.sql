-- The newest $4 dead letters by the first line of their error, queue and group, with the moment of each: what counts over time are made of.
-- $1 queue, $2 group, $3 part of the error; '' = all
SELECT error, queue, group_name, count(*) AS count, min(failed_at) AS first, max(failed_at) AS last,
       min(created_at) AS oldest, array_agg(extract(epoch FROM failed_at)::bigint) AS times
  FROM (SELECT left(split_part(d.error, E'\n', 1), 500) AS error, q.name AS queue, coalesce(g.name, '') AS group_name, d.failed_at, d.created_at
          FROM dead_letters d JOIN queues q ON q.id = d.queue_id AND q.deleted_at IS NULL
          LEFT JOIN groups g ON g.id = d.group_id
         WHERE ($1 = '' OR q.name = $1) AND ($2 = '' OR g.name = $2)
           AND ($3 = '' OR strpos(lower(d.error), lower($3)) > 0)
         ORDER BY d.id DESC LIMIT $4) newest
 GROUP BY 1, 2, 3 ORDER BY count(*) DESC, error LIMIT 200
