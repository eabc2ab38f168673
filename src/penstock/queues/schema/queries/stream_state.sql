-- stream_state: the state of a query in a partition. A NULL or empty filter lets everything through.
-- $1 query, $2 partition, $3 keys, $4 what keys begin with, $5 milliseconds: only values whose windowEnd is not later
SELECT s.key, s.value::text AS value, s.updated_at FROM stream_state s
 WHERE s.query_id = $1 AND s.partition_id = $2 AND (cardinality($3::text[]) = 0 OR s.key = ANY ($3))
   AND starts_with(s.key, $4::text)
   AND ($5::bigint IS NULL
        OR CASE WHEN jsonb_typeof(s.value -> 'windowEnd') = 'number' THEN (s.value ->> 'windowEnd')::numeric <= $5 END)
 ORDER BY s.key COLLATE "C";
