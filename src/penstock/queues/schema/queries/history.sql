-- history: what happened per time bucket.
-- $1 from, $2 to, $3 seconds per bucket, $4 queue, $5 namespace, $6 task; NULL = all
SELECT to_timestamp(floor(extract(epoch FROM minute) / $3) * $3) AS bucket, sum(pushed)::bigint AS pushed,
        sum(done - dead - dropped)::bigint AS completed, sum(failed)::bigint AS failed, sum(dead)::bigint AS dead
   FROM (SELECT minute, queue_id, pushed, done, failed, dead, dropped FROM history WHERE minute BETWEEN $1 AND $2
         UNION ALL
         SELECT at, queue_id, pushed, done, failed, dead, dropped FROM tally_log WHERE at BETWEEN $1 AND $2) h
  WHERE coalesce($4::text, $5::text, $6::text) IS NULL
     OR queue_id IN (SELECT id FROM queues WHERE deleted_at IS NULL AND ($4 IS NULL OR name = $4)
                        AND ($5 IS NULL OR namespace = $5) AND ($6 IS NULL OR task = $6))
  GROUP BY 1 ORDER BY 1;
