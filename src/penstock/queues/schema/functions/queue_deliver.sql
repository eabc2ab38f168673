-- queue_deliver: append messages that are due to their partitions, up to p_limit of them, in the order of their due times
-- within each partition. Any number of brokers may call this at once: a partition that another transaction has locked is left out.
--   p_since  leave out those that were due before this (a hint that keeps the scan short; NULL = all)
--   p_skip   partitions to leave alone
--   p_only   just this partition: wait for its lock for a moment (those of p_skip, one at a time)
-- Returns how many were appended, where (queues with their counts of messages and partitions), which partitions were locked
-- by others (`locked`), whether there is more at once, and in how many seconds the next one is due (NULL = none waits).
-- A queue that was deleted takes none: they go with it.
CREATE FUNCTION queue_deliver(
  p_since timestamptz, p_skip bigint[], p_only bigint, p_limit int,
  OUT delivered bigint, OUT queue_names text[], OUT message_counts bigint[], OUT partition_counts bigint[], OUT locked bigint[],
  OUT more boolean, OUT next_seconds double precision, OUT database_now timestamptz
) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  ids bigint[]; ours bigint[]; filled bigint[]; rows tid[]; t timestamptz := clock_timestamp();
BEGIN
  delivered := 0; more := false;
  IF p_only IS NOT NULL THEN
    BEGIN
      PERFORM set_config('lock_timeout', '100ms', true);
      PERFORM 1 FROM partitions p WHERE p.id = p_only FOR NO KEY UPDATE;
      PERFORM set_config('lock_timeout', '0', true);
      t := clock_timestamp();
      ids := ARRAY[p_only];
    EXCEPTION WHEN lock_not_available THEN locked := ARRAY[p_only];
    END;
  ELSE
    SELECT array_agg(DISTINCT s.partition_id) INTO ids FROM (
      SELECT s.partition_id FROM scheduled_messages s
       WHERE s.due_at <= t AND s.due_at >= coalesce(p_since, '-infinity') AND s.partition_id <> ALL (p_skip)
       ORDER BY s.due_at, s.id LIMIT p_limit) s;
  END IF;

  IF ids IS NOT NULL THEN
    SELECT array_agg(l.id ORDER BY l.id) INTO ours FROM (
      SELECT p.id FROM partitions p WHERE p.id = ANY (ids) ORDER BY p.id FOR NO KEY UPDATE SKIP LOCKED) l;
    SELECT array_agg(p.id) INTO locked FROM partitions p WHERE p.id = ANY (ids) AND p.id <> ALL (coalesce(ours, '{}'));
    rows := ARRAY(  -- stay where they are: who removes one has its partition locked
      SELECT s.row FROM (  -- OFFSET 0: found by their due time, not by their partition, where a million may wait
        SELECT s.ctid AS row, s.partition_id FROM scheduled_messages s
         WHERE s.due_at <= t AND s.due_at >= coalesce(p_since, '-infinity') ORDER BY s.due_at, s.id OFFSET 0) s
       WHERE s.partition_id = ANY (ids) AND s.partition_id <> ALL (coalesce(locked, '{}')) LIMIT p_limit);
    more := cardinality(rows) = p_limit;

    WITH gone AS MATERIALIZED (
      DELETE FROM scheduled_messages s WHERE s.ctid = ANY (rows) RETURNING s.*
    ), log AS MATERIALIZED (
      SELECT p.id, p.queue_id, q.name, coalesce(last.seq, p.floor) AS head, greatest(t, last.created_at) AS created_at
        FROM partitions p JOIN queues q ON q.id = p.queue_id AND q.deleted_at IS NULL
        LEFT JOIN LATERAL (SELECT m.seq, m.created_at FROM messages m WHERE m.partition_id = p.id
                            ORDER BY m.seq DESC LIMIT 1) last ON true
       WHERE p.id = ANY (ours)
    ), inserted AS (
      INSERT INTO messages (partition_id, seq, created_at, queue_id, transaction_id, trace_id, producer, key_id, payload, headers)
      SELECT g.partition_id, l.head + row_number() OVER (PARTITION BY g.partition_id ORDER BY g.due_at, g.id), l.created_at,
             l.queue_id, g.transaction_id, g.trace_id, g.producer, g.key_id, g.payload, g.headers
        FROM gone g JOIN log l ON l.id = g.partition_id ORDER BY g.partition_id, g.due_at, g.id
      RETURNING partition_id
    ), filling AS MATERIALIZED (
      SELECT i.partition_id, count(*) AS n FROM inserted i GROUP BY 1
    ), queued AS MATERIALIZED (
      SELECT l.queue_id, l.name, sum(f.n)::bigint AS n, count(*) AS partitions
        FROM filling f JOIN log l ON l.id = f.partition_id GROUP BY 1, 2
    ), counted AS (
      INSERT INTO tally_log (queue_id, group_id, pushed, consumed)
      SELECT q.queue_id, 0, q.n, 0 FROM queued q
      UNION ALL SELECT g.queue_id, -1, 0, -count(*) FROM gone g GROUP BY 1
    )
    SELECT coalesce(sum(q.n), 0), array_agg(q.name), array_agg(q.n), array_agg(q.partitions),
           (SELECT array_agg(f.partition_id) FROM filling f)
      INTO delivered, queue_names, message_counts, partition_counts, filled
      FROM queued q;
    IF filled IS NOT NULL THEN PERFORM queue_wake(filled, t); END IF;
    PERFORM queue_unflag(ours);
  END IF;

  database_now := clock_timestamp();
  SELECT extract(epoch FROM s.due_at - database_now) INTO next_seconds FROM scheduled_messages s
   WHERE s.due_at > t ORDER BY s.due_at LIMIT 1;
END $$;
