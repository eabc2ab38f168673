-- queue_ack: acknowledge messages. Acknowledgements that follow each other and have all but the
-- transaction id in common are a run; p_starts is how many transaction ids come before each run's
-- first, the arrays beside it are parallel to it.
-- Statuses are completed, failed, retry or dlq; a NULL lease is not checked.
-- One row per partition and group, with the positions of its items; outcomes NULL = all ok, and then
-- released[1] and dead[1] go for all of them:
--   outcomes  ok; done (was settled before, nothing changed); missing (no such message);
--             lease (invalid or expired lease); idle (the group has never taken from the partition)
--   released  the item's lease ended with this call;  dead  the message went to the dead letters
--   more      false = nothing is left for the group in this partition: nobody has to look
-- Messages are settled one by one, in any order, any number of times; a cursor moves only over its
-- settled prefix. The usual case is a whole lease completed: all those in one statement (queue_ack_plain),
-- what that leaves one by one (queue_ack_leases, queue_ack_each).
-- Planned once per session, like queue_push, with everything it calls.
CREATE FUNCTION queue_ack(
  p_starts int[], p_partitions bigint[], p_groups text[], p_leases uuid[], p_statuses text[],
  p_errors text[], p_transactions text[]
) RETURNS TABLE (
  items int[], outcomes text[], queue text, partition text, released boolean[], dead boolean[], more boolean
) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  k record; c cursors; q queues; plain int[] := '{}';
BEGIN
  FOR k IN SELECT * FROM queue_ack_plain(p_starts, p_partitions, p_groups, p_leases, p_statuses, p_transactions) LOOP
    plain := plain || k.run;
    items := k.items; outcomes := NULL; queue := k.queue; partition := k.partition;
    released := ARRAY[true]; dead := ARRAY[false]; more := k.more;
    RETURN NEXT;
  END LOOP;
  IF cardinality(plain) = cardinality(p_starts) THEN RETURN; END IF;
  FOR k IN
    SELECT a.*, p.name AS partition, p.queue_id, g.id AS group_id
      FROM (SELECT u.partition_id, u.group_name, array_agg(u.ord) AS ords,
                   array_agg(u.transaction_id) AS transactions, array_agg(u.lease_id) AS leases,
                   array_agg(u.status) AS statuses, array_agg(u.error) AS errors,
                   bool_and(u.status = 'completed') AND count(u.lease_id) = count(*) AS uniform
              FROM (SELECT r.*, s.ord, p_transactions[s.ord] AS transaction_id
                      FROM unnest(p_starts, p_starts[2:], p_partitions, p_groups, p_leases,
                                  p_statuses, p_errors) WITH ORDINALITY
                             AS r (start, stop, partition_id, group_name, lease_id, status, error, run)
                     CROSS JOIN generate_series(
                       r.start + 1, coalesce(r.stop, cardinality(p_transactions))) s (ord)
                     WHERE NOT r.run = ANY (plain)) u
             GROUP BY 1, 2) a
      LEFT JOIN partitions p ON p.id = a.partition_id
      LEFT JOIN groups g ON g.queue_id = p.queue_id AND g.name = a.group_name
     ORDER BY a.partition_id, g.id
  LOOP
    SELECT * INTO q FROM queues x WHERE x.id = k.queue_id;
    c := NULL;
    IF k.group_id IS NOT NULL THEN
      SELECT * INTO c FROM cursors x
       WHERE x.partition_id = k.partition_id AND x.group_id = k.group_id
       ORDER BY x.version DESC LIMIT 1 FOR UPDATE;
    END IF;
    IF k.uniform AND c.version IS NOT NULL
       AND queue_ack_leases(c, q, k.leases, k.transactions) THEN
      RETURN QUERY
        SELECT k.ords, NULL::text[], q.name, k.partition, ARRAY[true], ARRAY[false], true;
    ELSE
      RETURN QUERY
        SELECT e.items, e.outcomes, q.name, k.partition, e.released, e.dead, true
          FROM queue_ack_each(c, q, k.partition_id, k.ords, k.transactions, k.leases, k.statuses,
                              k.errors) e;
    END IF;
  END LOOP;
END $$;
