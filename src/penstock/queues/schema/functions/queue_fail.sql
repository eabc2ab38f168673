-- queue_fail: count an attempt of each message; those that used up their attempts go to the dead-letter queue, or are
-- dropped where the queue wants none. p_delay: wait for retryDelay before the next attempt. p_force: straight to the
-- dead letters (status dlq). p_delays, p_limits: seconds before the next attempt and the number of attempts, where they are
-- not those of the queue; parallel to p_seqs. The caller holds the cursor. Answers the messages that are settled by this.
CREATE FUNCTION queue_fail(
  q queues, p_partition bigint, p_group int, p_seqs bigint[], p_errors text[], p_delay boolean, p_force boolean,
  p_now timestamptz, p_delays double precision[] DEFAULT NULL, p_limits int[] DEFAULT NULL
) RETURNS int8multirange LANGUAGE plpgsql AS $$
DECLARE
  over int8multirange; n bigint; keep boolean := p_force OR q.dead_letter_queue AND q.dlq_after_max_retries;
BEGIN
  INSERT INTO attempts AS a (partition_id, group_id, seq, attempts, retry_at, error)
  SELECT p_partition, p_group, f.seq, 1,
         p_now + make_interval(secs => coalesce(f.delay, CASE WHEN p_delay THEN q.retry_delay / 1000.0 ELSE 0 END)), f.error
    FROM unnest(p_seqs, p_errors, p_delays) AS f (seq, error, delay) ORDER BY f.seq
  ON CONFLICT (partition_id, group_id, seq) DO UPDATE SET
    attempts = a.attempts + 1, retry_at = excluded.retry_at, error = excluded.error;

  WITH used_up AS MATERIALIZED (
    DELETE FROM attempts a
     WHERE a.partition_id = p_partition AND a.group_id = p_group AND a.seq = ANY (p_seqs)
       AND (p_force OR a.attempts >= coalesce(p_limits[array_position(p_seqs, a.seq)], q.retry_limit + 1))
    RETURNING a.seq, a.attempts, a.error
  ), letters AS (
    INSERT INTO dead_letters (queue_id, partition_id, group_id, seq, failed_at, attempts, error, created_at,
                              transaction_id, trace_id, producer, key_id, payload, headers)
    SELECT m.queue_id, p_partition, p_group, u.seq, p_now, u.attempts, u.error, m.created_at,
           m.transaction_id, m.trace_id, m.producer, m.key_id, m.payload, m.headers
      FROM used_up u JOIN messages m ON m.partition_id = p_partition AND m.seq = u.seq
     WHERE keep ORDER BY u.seq
  )
  SELECT range_agg(int8range(seq, seq + 1)), count(*) INTO over, n FROM used_up;

  INSERT INTO tally_log (queue_id, group_id, failed, retried, consumed, done, dead, dropped)
  VALUES (q.id, p_group, cardinality(p_seqs), cardinality(p_seqs) - n, n, n, CASE WHEN keep THEN n ELSE 0 END, CASE WHEN keep THEN 0 ELSE n END);
  RETURN coalesce(over, '{}');
END $$;
