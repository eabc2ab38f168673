-- queue_cancel: remove messages for later from partitions, before they are due: the one with a transaction id, or up to
-- p_limit of all (NULL). Answers how many. Waits for who has a partition locked.
CREATE FUNCTION queue_cancel(p_partitions bigint[], p_transaction text, p_limit int) RETURNS bigint LANGUAGE plpgsql
SET plan_cache_mode = force_custom_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  n bigint;
BEGIN
  PERFORM 1 FROM partitions p WHERE p.id = ANY (p_partitions) ORDER BY p.id FOR NO KEY UPDATE;
  WITH gone AS (
    DELETE FROM scheduled_messages s WHERE s.ctid = ANY (ARRAY(
      SELECT x.ctid FROM scheduled_messages x
       WHERE x.partition_id = ANY (p_partitions)
         AND (p_transaction IS NULL OR x.transaction_id = p_transaction
              AND hashtextextended(x.transaction_id, 0) = hashtextextended(p_transaction, 0)) LIMIT p_limit))
    RETURNING s.queue_id
  ), counted AS (
    INSERT INTO tally_log (queue_id, group_id, consumed) SELECT g.queue_id, -1, -count(*) FROM gone g GROUP BY 1
  )
  SELECT count(*) INTO n FROM gone;
  PERFORM queue_unflag(p_partitions);
  RETURN n;
END $$;
