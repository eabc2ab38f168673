-- queue_fail: count an attempt of each message; those that used up their attempts go to the dead-letter queue, or are
-- dropped where the queue wants none. The caller holds the cursor. Parallel to p_seqs:
--   p_errors   why each failed
--   p_delays   the seconds before the next attempt. NULL: as the queue says
--   p_limits   the number of attempts. NULL: as the queue says; 0: straight to the dead letters, whatever the queue wants
-- Returns the messages that are settled by this, and those of them that are dead letters.
CREATE FUNCTION queue_fail(
  q queues, p_partition bigint, p_group int, p_seqs bigint[], p_errors text[], p_delays double precision[], p_limits int[],
  p_now timestamptz, OUT settled int8multirange, OUT dead int8multirange
) LANGUAGE plpgsql AS $$
DECLARE
  n bigint; letters bigint; keep boolean := q.dead_letter_queue AND q.dlq_after_max_retries;
BEGIN
  INSERT INTO attempts AS a (partition_id, group_id, seq, attempts, retry_at, error)
  SELECT p_partition, p_group, f.seq, 1, p_now + make_interval(secs => coalesce(f.delay, q.retry_delay / 1000.0)), f.error
    FROM unnest(p_seqs, p_errors, p_delays) AS f (seq, error, delay) ORDER BY f.seq
  ON CONFLICT (partition_id, group_id, seq) DO UPDATE SET
    attempts = a.attempts + 1, retry_at = excluded.retry_at, error = excluded.error;

  WITH used_up AS MATERIALIZED (
    DELETE FROM attempts a
     WHERE a.partition_id = p_partition AND a.group_id = p_group AND a.seq = ANY (p_seqs)
       AND a.attempts >= coalesce(p_limits[array_position(p_seqs, a.seq)], q.retry_limit + 1)
    RETURNING a.seq, a.attempts, a.error, keep OR p_limits[array_position(p_seqs, a.seq)] IS NOT DISTINCT FROM 0 AS kept
  ), stored AS (
    INSERT INTO dead_letters (queue_id, partition_id, group_id, seq, failed_at, attempts, error, created_at,
                              transaction_id, trace_id, producer, key_id, payload, headers)
    SELECT m.queue_id, p_partition, p_group, u.seq, p_now, u.attempts, u.error, m.created_at,
           m.transaction_id, m.trace_id, m.producer, m.key_id, m.payload, m.headers
      FROM used_up u JOIN messages m ON m.partition_id = p_partition AND m.seq = u.seq
     WHERE u.kept ORDER BY u.seq
  )
  SELECT coalesce(range_agg(int8range(u.seq, u.seq + 1)), '{}'),
         coalesce(range_agg(int8range(u.seq, u.seq + 1)) FILTER (WHERE u.kept), '{}'),
         count(*), count(*) FILTER (WHERE u.kept)
    INTO settled, dead, n, letters FROM used_up u;

  INSERT INTO tally_log (queue_id, group_id, failed, retried, consumed, done, dead, dropped)
  VALUES (q.id, p_group, cardinality(p_seqs), cardinality(p_seqs) - n, n, n, letters, n - letters);
END $$;
