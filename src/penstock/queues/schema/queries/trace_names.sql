-- trace_names: names of traces, the last one used first.
-- $1 limit, $2 offset
SELECT n.name AS trace_name, count(*) AS trace_count, count(DISTINCT (t.partition_id, t.seq)) AS message_count,
        max(n.at) AS last_seen, count(*) OVER () AS total
   FROM trace_names n JOIN traces t ON t.id = n.trace_id GROUP BY n.name
  ORDER BY max(n.at) DESC LIMIT $1 OFFSET $2;
