-- removals: what upkeep deleted, per time bucket, queue and reason.
-- $1 from, $2 to, $3 seconds per bucket, $4 queue; NULL = all
SELECT to_timestamp(floor(extract(epoch FROM r.minute) / $3) * $3) AS bucket, r.reason, q.name, q.namespace, q.task,
        sum(r.messages)::bigint AS messages, sum(r.steps)::bigint AS steps
   FROM removals r LEFT JOIN queues q ON q.id = r.queue_id AND q.deleted_at IS NULL
  WHERE r.minute BETWEEN date_trunc('minute', $1::timestamptz) AND $2 AND ($4::text IS NULL OR q.name = $4)
  GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 3, 2;
