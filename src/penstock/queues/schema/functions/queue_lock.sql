-- queue_lock: take every lock a transaction of pushes and acknowledgements will need, in the one order that all follow.
CREATE FUNCTION queue_lock(p_pushed bigint[], p_acked bigint[], p_groups text[]) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
BEGIN
  PERFORM 1 FROM partitions p WHERE p.id = ANY (p_pushed) ORDER BY p.id FOR NO KEY UPDATE;
  PERFORM queue_lock_cursor(w.partition_id, w.group_id) FROM (
    SELECT DISTINCT x.partition_id, x.group_id FROM (
      SELECT p.id AS partition_id, g.id AS group_id FROM partitions p JOIN groups g ON g.queue_id = p.queue_id
       WHERE p.id = ANY (p_pushed)
      UNION ALL
      SELECT p.id, g.id FROM unnest(p_acked, p_groups) AS u (partition_id, name)
        JOIN partitions p ON p.id = u.partition_id JOIN groups g ON g.queue_id = p.queue_id AND g.name = u.name) x
     ORDER BY 1, 2 OFFSET 0) w;
END $$;
CREATE FUNCTION queue_lock_cursor(p_partition bigint, p_group int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM 1 FROM cursors x WHERE x.partition_id = p_partition AND x.group_id = p_group ORDER BY x.version DESC LIMIT 1 FOR UPDATE;
END $$;
