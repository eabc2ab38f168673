-- consumers: how many connections pop, by queue and group, in the processes that are alive.
-- $1 seconds after which a silent process is gone, $2 the process that is left out ('' = none)
SELECT c->>0 AS queue, c->>1 AS group_name, sum((c->>2)::int)::int AS consumers
  FROM (SELECT DISTINCT ON (member) figures FROM members
         WHERE minute >= date_trunc('minute', clock_timestamp()) - interval '1 minute'
           AND seen_at > clock_timestamp() - make_interval(secs => $1) AND member <> $2
         ORDER BY member, minute DESC) alive
 CROSS JOIN LATERAL jsonb_array_elements(coalesce(alive.figures->'consumers', '[]')) c
 GROUP BY 1, 2;
