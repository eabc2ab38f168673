-- queue_trim: one step of retention. Looks at p_limit messages of a queue in the order of the transactions that stored
-- them, from p_after on and the last transaction to its end, and deletes those created at or before p_before (with
-- p_settled: only what every group has settled). Answers what was deleted, where to go on, and whether there is more to
-- look at.
CREATE FUNCTION queue_trim(
  p_queue int, p_before timestamptz, p_settled boolean, p_after xid8, p_limit int,
  OUT deleted bigint, OUT reached xid8, OUT more boolean
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  ids bigint[]; uptos bigint[]; looked bigint; old bigint;
BEGIN
  WITH seen AS MATERIALIZED (
    SELECT m.partition_id, m.seq, m.created_at, m.xid FROM messages m
     WHERE m.queue_id = p_queue AND m.xid >= p_after ORDER BY m.xid
     FETCH FIRST (p_limit) ROWS WITH TIES
  ), victim AS (
    SELECT s.partition_id, max(s.seq) AS upto FROM seen s WHERE s.created_at <= p_before GROUP BY 1
  )
  SELECT (SELECT array_agg(v.partition_id ORDER BY v.partition_id) FROM victim v),
         (SELECT array_agg(v.upto ORDER BY v.partition_id) FROM victim v),
         (SELECT max(s.xid::text::numeric)::text::xid8 FROM seen s), (SELECT count(*) FROM seen),
         (SELECT count(*) FROM seen s WHERE s.created_at <= p_before)
    INTO ids, uptos, reached, looked, old;
  deleted := 0;
  IF ids IS NOT NULL THEN
    deleted := queue_remove(ids, array_fill(0::bigint, ARRAY[cardinality(ids)]), uptos, p_settled);
  END IF;
  more := looked >= p_limit AND old > 0;
  reached := (reached::text::numeric + 1)::text::xid8;
END $$;
