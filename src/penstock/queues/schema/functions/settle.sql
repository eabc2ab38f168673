-- settle: record the outcome of delivered messages.
--
-- Acknowledgements that follow each other and have all but the transaction id in common are a run. One element per run:
--   p_starts                  how many transaction ids come before the first one of the run
--   p_partitions, p_groups    the partition, and the name of the group that answers
--   p_leases                  the lease under which the messages were delivered. NULL: it is not checked
--   p_statuses, p_errors      completed; failed (counts an attempt); retry (does not); dlq (straight to the dead letters).
--                             NULL: all are completed, and none has an error
--   p_delays, p_limits        failed: the seconds before the next attempt and the number of attempts, where they are not those
--                             of the queue; retry: the seconds before it is delivered again. NULL: there are none
--   p_transactions            the transaction ids of all runs, one run after the other
-- A broker that remembers a lease which it delivered, and gets all of its messages completed, says so for that run; the arrays
-- are NULL when there is no such run:
--   p_group_ids, p_versions, p_lasts    the group's number, the version that the cursor had then, and the last message's number
--   p_times                   when the messages were created, in seconds since 1970 as `take` returned it, parallel to p_transactions
-- Returns a row for the runs that were completed by their version, and one for each other run:
--   runs              which runs, from 1
--   more              parallel to runs; false: nothing is left for the group in this partition, so that no pop has to poll
--   queue, partition  their names; NULL for runs that were completed by their version: the caller knows them
--   outcomes          NULL: all are ok, their lease ended now and none is a dead letter. Otherwise, parallel to the run:
--                     ok; done (settled before, nothing changed); missing (no such message); lease (invalid or expired lease);
--                     idle (the group has never taken from the partition)
--   released, dead    parallel to outcomes: the lease ended with this call; the message became a dead letter
--
-- Messages are settled one by one, in any order, any number of times; a cursor's position moves only over its settled prefix.
-- Cursors are locked by partition and group, in the order that all follow.
-- Planned once per session, like append, with everything that it calls (docs/decisions/queues.md).
CREATE TYPE settled AS (
  runs int[], more boolean[], queue text, partition text, outcomes text[], released boolean[], dead boolean[]
);
CREATE FUNCTION settle(
  p_starts int[], p_partitions bigint[], p_groups text[], p_leases uuid[], p_statuses text[], p_errors text[],
  p_transactions text[], p_group_ids int[] DEFAULT NULL, p_versions bigint[] DEFAULT NULL, p_lasts bigint[] DEFAULT NULL,
  p_times double precision[] DEFAULT NULL, p_delays double precision[] DEFAULT NULL, p_limits int[] DEFAULT NULL
) RETURNS SETOF settled LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET max_parallel_workers_per_gather = 0
AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock_timestamp(); r settled; k record; c cursors; q queues; total int := cardinality(p_transactions);
BEGIN
  -- Leases completed as a whole by the version of their cursor, without reading a message. A cursor that changed since, for
  -- whatever reason, has another version; its run is looked up below.
  IF p_versions IS NOT NULL THEN
    IF array_position(p_versions, NULL) IS NOT NULL THEN PERFORM queue_lock('{}', p_partitions, p_groups); END IF;
    WITH moved AS (
      UPDATE cursors c
         SET version = c.version + 1, position = w.last, leased = '{}', next_expiry = NULL,
             consumed = c.consumed + (w.stop - w.start), batches = c.batches + 1, consumed_at = t,
             due_at = CASE WHEN EXISTS (SELECT 1 FROM messages m WHERE m.partition_id = c.partition_id AND m.seq > w.last)
                           THEN clock_timestamp() ELSE queue_rest(c.partition_id, c.group_id, w.last, false, NULL) END
        FROM (SELECT u.*, coalesce(u.next_start, total) AS stop
                FROM unnest(p_partitions, p_group_ids, p_versions, p_leases, p_lasts, p_starts, p_starts[2:])
                       WITH ORDINALITY u (partition_id, group_id, version, lease_id, last, start, next_start, run)) w
       WHERE c.partition_id = w.partition_id AND c.group_id = w.group_id AND c.version = w.version
         AND c.lease_id = w.lease_id AND c.next_expiry > t
      RETURNING w.run, w.lease_id, c.partition_id, c.group_id, c.queue_id, w.start, w.stop, c.due_at IS NOT NULL AS more
    ), ended AS (
      DELETE FROM leases l USING moved w
       WHERE l.lease_id = w.lease_id AND l.partition_id = w.partition_id AND l.group_id = w.group_id
    ), counted AS (
      INSERT INTO tally_log (queue_id, group_id, consumed, done, bucket, counts)
      SELECT w.queue_id, w.group_id, count(*), count(*), latency_bucket(t - to_timestamp(max(x.at))),
             CASE WHEN count(*) > 1 THEN latency_counts(array_agg(to_timestamp(x.at) ORDER BY x.at), t) END
        FROM moved w CROSS JOIN LATERAL unnest(p_times[w.start + 1 : w.stop]) x (at) GROUP BY 1, 2
    )
    SELECT array_agg(w.run::int), array_agg(w.more) INTO r.runs, r.more FROM moved w;
    IF r.runs IS NOT NULL THEN RETURN NEXT r; END IF;
    IF cardinality(r.runs) = cardinality(p_starts) THEN RETURN; END IF;
  END IF;

  -- Every other run, cursor by cursor.
  FOR k IN
    SELECT a.*, p.name AS partition, p.queue_id, g.id AS group_id
      FROM (SELECT u.partition_id, u.group_name, array_agg(u.run) AS runs, array_agg(u.transaction_id) AS transactions,
                   array_agg(u.lease_id) AS leases, array_agg(u.status) AS statuses, array_agg(u.error) AS errors,
                   array_agg(u.delay) AS delays, array_agg(u.max_attempts) AS limits
              FROM (SELECT x.partition_id, x.group_name, x.lease_id, coalesce(x.status, 'completed') AS status, x.error,
                           x.delay, x.max_attempts, x.run::int, p_transactions[s.n] AS transaction_id
                      FROM unnest(p_starts, p_starts[2:], p_partitions, p_groups, p_leases, p_statuses, p_errors, p_delays, p_limits)
                             WITH ORDINALITY x (start, stop, partition_id, group_name, lease_id, status, error, delay, max_attempts, run)
                     CROSS JOIN LATERAL generate_series(x.start + 1, coalesce(x.stop, total)) s (n)
                     WHERE x.run <> ALL (coalesce(r.runs, '{}')) ORDER BY s.n) u
             GROUP BY 1, 2) a
      LEFT JOIN partitions p ON p.id = a.partition_id
      LEFT JOIN groups g ON g.queue_id = p.queue_id AND g.name = a.group_name
     ORDER BY a.partition_id, g.id
  LOOP
    SELECT x.* INTO q FROM queues x WHERE x.id = k.queue_id;
    c := NULL;
    IF k.group_id IS NOT NULL THEN
      SELECT x.* INTO c FROM cursors x WHERE x.partition_id = k.partition_id AND x.group_id = k.group_id
       ORDER BY x.version DESC LIMIT 1 FOR UPDATE;
    END IF;
    RETURN QUERY
      SELECT ARRAY[s.run], ARRAY[true], q.name, k.partition, s.outcomes, s.released, s.dead
        FROM settle_cursor(c, q, k.partition_id, k.runs, k.transactions, k.leases, k.statuses, k.errors,
                           k.delays, k.limits) s;
  END LOOP;
END $$;
