-- What happened to a message, as far as rows say so, the oldest first. Events without a time come last.
-- $1 id of the partition, $2 transaction id
WITH message AS MATERIALIZED (
  SELECT m.partition_id, m.seq, m.queue_id, m.created_at, m.producer FROM message_named($1, $2) m
), letters AS MATERIALIZED (
  SELECT d.*, coalesce(g.name, '') AS group_name FROM dead_letters d LEFT JOIN groups g ON g.id = d.group_id
   WHERE d.partition_id = $1 AND d.transaction_id = $2
     AND (d.seq IN (SELECT seq FROM message) OR NOT EXISTS (SELECT 1 FROM message))
), noted AS MATERIALIZED (
  -- an answer is noted a moment after what it did: the last one comes before the letter that it made
  SELECT least(f.at, (SELECT d.failed_at FROM letters d WHERE d.group_name = f.group_name LIMIT 1)) AS at, f.group_name, f.worker, f.error
    FROM failures f
   WHERE f.partition_id = $1 AND f.seq IN (SELECT seq FROM message UNION SELECT seq FROM letters) ORDER BY f.id DESC LIMIT 20
)
SELECT created_at AS at, 'pushed' AS kind, '' AS group_name, coalesce(producer, '') AS who, '' AS why, NULL::int AS attempts,
       NULL::timestamptz AS until
  FROM message
UNION ALL
SELECT l.taken_at, 'leased', g.name, l.lease_id::text, '', NULL, l.expires_at
  FROM message m JOIN leases l ON l.partition_id = m.partition_id AND l.queue_id > 0 AND l.open @> m.seq
  JOIN groups g ON g.id = l.group_id WHERE l.expires_at > clock_timestamp()
UNION ALL
SELECT f.at, 'failed', f.group_name, f.worker, f.error, NULL, NULL FROM noted f
UNION ALL
SELECT NULL, CASE WHEN EXISTS (SELECT 1 FROM noted f WHERE f.group_name = g.name) THEN 'retry' ELSE 'failed' END,
       g.name, '', coalesce(a.error, 'the lease expired'), a.attempts, a.retry_at
  FROM message m JOIN groups g ON g.queue_id = m.queue_id
  JOIN attempts a ON a.partition_id = m.partition_id AND a.group_id = g.id AND a.seq = m.seq
UNION ALL
SELECT d.failed_at, 'dead letter', d.group_name, '', d.error, d.attempts, NULL FROM letters d
UNION ALL
SELECT t.at, CASE WHEN t.event_type = 'requeued' THEN 'requeued' ELSE 'trace' END, t.group_name, coalesce(t.worker, ''),
       CASE WHEN t.event_type = 'requeued' THEN '' ELSE t.event_type || ': ' END || left(convert_from(t.data, 'UTF8'), 500), NULL, NULL
  FROM message m JOIN traces t ON t.partition_id = m.partition_id AND t.seq = m.seq
UNION ALL
SELECT NULL, 'completed', g.name, '', '', NULL, NULL
  FROM message m JOIN groups g ON g.queue_id = m.queue_id
  JOIN LATERAL (SELECT c.position, c.settled FROM cursors c WHERE c.partition_id = m.partition_id AND c.group_id = g.id
                 ORDER BY c.version DESC LIMIT 1) c ON c.position >= m.seq OR c.settled @> m.seq
 WHERE NOT EXISTS (SELECT 1 FROM letters d WHERE d.group_id = g.id)
UNION ALL
SELECT NULL, 'waiting', g.name, '', '', NULL, NULL
  FROM message m JOIN groups g ON g.queue_id = m.queue_id
  JOIN LATERAL (SELECT c.position, c.settled, c.leased FROM cursors c WHERE c.partition_id = m.partition_id AND c.group_id = g.id
                 ORDER BY c.version DESC LIMIT 1) c ON NOT (c.position >= m.seq OR c.settled @> m.seq OR c.leased @> m.seq)
ORDER BY 1 NULLS LAST, 2 DESC
