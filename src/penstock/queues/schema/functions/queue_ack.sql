-- queue_ack: settle messages. Acknowledgements that follow each other and have all but the transaction id in common are a
-- run; p_starts is how many transaction ids come before each run's first, the arrays beside it are parallel to it.
-- Statuses are completed, failed, retry or dlq; a NULL lease is not checked.
-- One row per partition and group, with the positions of its items; outcomes NULL = all ok, and then released[1] and
-- dead[1] go for all of them:
--   outcomes  ok; done (was settled before, nothing changed); missing (no such message); lease (invalid or expired lease);
--             idle (the group has never taken from the partition)
--   released  the item's lease ended with this call;  dead  the message went to the dead letters
-- Messages are settled one by one, in any order, any number of times; a cursor moves only over its settled prefix.
-- Planned once per session, like queue_push.
CREATE FUNCTION queue_ack(
  p_starts int[], p_partitions bigint[], p_groups text[], p_leases uuid[], p_statuses text[], p_errors text[],
  p_transactions text[]
) RETURNS TABLE (items int[], outcomes text[], queue text, partition text, released boolean[], dead boolean[])
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
DECLARE
  k record; c cursors; q queues; held leases; t timestamptz;
  ords int[]; classes text[]; seqs bigint[]; lease_of uuid[];
  completed int8multirange; answered int8multirange; buried int8multirange; given_up int8multirange;
  failed bigint[]; failures text[]; direct bigint[]; reasons text[]; listed text[]; ended uuid[]; n bigint;
  times timestamptz[]; again bigint;
BEGIN
  FOR k IN
    SELECT a.*, p.name AS partition, p.queue_id, g.id AS group_id
      FROM (SELECT u.partition_id, u.group_name, array_agg(u.ord) AS ords, array_agg(u.transaction_id) AS transactions,
                   array_agg(u.lease_id) AS leases, array_agg(u.status) AS statuses, array_agg(u.error) AS errors,
                   bool_and(u.status = 'completed') AND count(DISTINCT u.lease_id) = 1 AND count(u.lease_id) = count(*) AS uniform
              FROM (SELECT r.*, s.ord, p_transactions[s.ord] AS transaction_id
                      FROM unnest(p_starts, p_starts[2:], p_partitions, p_groups, p_leases, p_statuses, p_errors)
                             AS r (start, stop, partition_id, group_name, lease_id, status, error)
                     CROSS JOIN generate_series(r.start + 1, coalesce(r.stop, cardinality(p_transactions))) s (ord)) u
             GROUP BY 1, 2) a
      LEFT JOIN partitions p ON p.id = a.partition_id
      LEFT JOIN groups g ON g.queue_id = p.queue_id AND g.name = a.group_name
     ORDER BY a.partition_id, g.id
  LOOP
    IF k.queue_id IS NULL THEN
      RETURN QUERY SELECT k.ords, (SELECT array_agg('missing'::text) FROM unnest(k.ords)), NULL::text, NULL::text,
        (SELECT array_agg(NULL::boolean) FROM unnest(k.ords)), (SELECT array_agg(false) FROM unnest(k.ords));
      CONTINUE;
    END IF;
    SELECT * INTO q FROM queues WHERE id = k.queue_id;
    c := NULL;
    IF k.group_id IS NOT NULL THEN
      SELECT * INTO c FROM cursors x WHERE x.partition_id = k.partition_id AND x.group_id = k.group_id
       ORDER BY x.version DESC LIMIT 1 FOR UPDATE;
    END IF;
    t := clock_timestamp();

    -- The usual case: a whole lease completed. Comparing it as a list beats looking up each message.
    IF k.uniform AND c.version IS NOT NULL THEN
      SELECT * INTO held FROM leases x WHERE x.lease_id = k.leases[1] AND x.partition_id = k.partition_id
         AND x.group_id = k.group_id AND x.expires_at > t;
      n := cardinality(k.ords);
      IF FOUND AND n = (SELECT sum(upper(r) - lower(r)) FROM unnest(held.open) r) THEN
        SELECT array_agg(m.transaction_id), array_agg(m.created_at) INTO listed, times
          FROM unnest(held.open) r CROSS JOIN LATERAL (
          SELECT m.seq, m.transaction_id, m.created_at FROM messages m
           WHERE m.partition_id = k.partition_id AND m.seq >= lower(r) AND m.seq < upper(r)
           ORDER BY m.seq LIMIT upper(r) - lower(r)) m;
        IF listed = k.transactions OR
           (SELECT array_agg(x ORDER BY x COLLATE "C") FROM unnest(listed) x)
             = (SELECT array_agg(x ORDER BY x COLLATE "C") FROM unnest(k.transactions) x) THEN
          completed := held.open;
          c.settled := c.settled + completed;
          c.leased := c.leased - completed;
          c.consumed := c.consumed + n;
          c.consumed_at := t;
          INSERT INTO tally_log (queue_id, group_id, consumed, done, bucket, counts)
          VALUES (k.queue_id, k.group_id, n, n, latency_bucket(t - times[n]), latency_counts(times, t));
          IF c.failing THEN
            DELETE FROM attempts a WHERE a.partition_id = k.partition_id AND a.group_id = k.group_id AND completed @> a.seq;
            c.failing := EXISTS (SELECT 1 FROM attempts a WHERE a.partition_id = k.partition_id AND a.group_id = k.group_id);
          END IF;
          DELETE FROM leases x
           WHERE x.lease_id = held.lease_id AND x.partition_id = k.partition_id AND x.group_id = k.group_id;
          c.batches := c.batches + 1;
          IF isempty(c.leased) THEN c.next_expiry := NULL; END IF;
          c.due_at := queue_next(c, q);
          PERFORM queue_keep(c);
          RETURN QUERY SELECT k.ords, NULL::text[], q.name, k.partition, ARRAY[true], ARRAY[false];
          CONTINUE;
        END IF;
      END IF;
    END IF;

    WITH item AS MATERIALIZED (
      SELECT i.ord, i.status, i.error, i.lease_id, m.seq, m.created_at,
             row_number() OVER (PARTITION BY m.seq ORDER BY i.ord) AS nth
        FROM unnest(k.ords, k.transactions, k.leases, k.statuses, k.errors)
               AS i (ord, transaction_id, lease_id, status, error)
        LEFT JOIN LATERAL (
          SELECT m.seq, m.created_at FROM messages m
           WHERE m.partition_id = k.partition_id AND m.transaction_id = i.transaction_id
             AND hashtextextended(m.transaction_id, 0) = hashtextextended(i.transaction_id, 0) LIMIT 1) m ON true
    ), lease AS MATERIALIZED (
      SELECT l.lease_id, l.open, l.taken FROM leases l
       WHERE l.lease_id = ANY (k.leases) AND l.partition_id = k.partition_id
         AND l.group_id = k.group_id AND l.expires_at > t
    ), classed AS MATERIALIZED (
      SELECT i.*, CASE
          WHEN i.seq IS NULL THEN 'missing'
          WHEN c.version IS NULL THEN 'idle'
          WHEN c.position >= i.seq OR c.settled @> i.seq THEN
            CASE WHEN i.status = 'completed' OR i.lease_id IS NULL OR l.taken @> i.seq
                   OR EXISTS (SELECT 1 FROM dead_letters d WHERE d.partition_id = k.partition_id AND d.seq = i.seq
                                 AND d.group_id = k.group_id) THEN 'done' ELSE 'lease' END
          WHEN i.lease_id IS NOT NULL AND l.taken @> i.seq IS NOT TRUE THEN 'lease'
          WHEN i.nth > 1 THEN 'done'
          WHEN i.lease_id IS NOT NULL AND NOT l.open @> i.seq THEN
            CASE WHEN i.status = 'completed' AND NOT c.leased @> i.seq THEN 'ok'
                 WHEN i.status = 'completed' THEN 'lease' ELSE 'done' END
          WHEN i.status IN ('failed', 'retry') AND NOT c.leased @> i.seq THEN 'done'
          ELSE 'ok' END AS class
        FROM item i LEFT JOIN lease l ON l.lease_id = i.lease_id
    )
    SELECT array_agg(x.ord ORDER BY x.ord), array_agg(x.class ORDER BY x.ord), array_agg(x.seq ORDER BY x.ord),
           array_agg(x.lease_id ORDER BY x.ord),
           range_agg(int8range(x.seq, x.seq + 1)) FILTER (WHERE x.class = 'ok' AND x.status = 'completed'),
           range_agg(int8range(x.seq, x.seq + 1)) FILTER (WHERE x.class = 'ok'),
           count(*) FILTER (WHERE x.class = 'ok' AND x.status = 'completed'),
           array_agg(x.seq ORDER BY x.seq) FILTER (WHERE x.class = 'ok' AND x.status = 'failed'),
           array_agg(coalesce(x.error, 'Retries exhausted') ORDER BY x.seq) FILTER (WHERE x.class = 'ok' AND x.status = 'failed'),
           array_agg(x.seq ORDER BY x.seq) FILTER (WHERE x.class = 'ok' AND x.status = 'dlq'),
           array_agg(coalesce(x.error, 'Moved to the dead-letter queue') ORDER BY x.seq)
             FILTER (WHERE x.class = 'ok' AND x.status = 'dlq'),
           array_agg(x.created_at ORDER BY x.seq) FILTER (WHERE x.class = 'ok' AND x.status = 'completed'),
           count(*) FILTER (WHERE x.class = 'ok' AND x.status = 'retry')
      INTO ords, classes, seqs, lease_of, completed, answered, n, failed, failures, direct, reasons, times, again
      FROM classed x;

    buried := '{}';
    ended := '{}';
    IF answered IS NOT NULL THEN
      IF completed IS NOT NULL THEN
        c.settled := c.settled + completed;
        c.consumed := c.consumed + n;
        c.consumed_at := t;
        INSERT INTO tally_log (queue_id, group_id, consumed, done, bucket, counts)
        VALUES (k.queue_id, k.group_id, n, n, latency_bucket(t - times[n]), latency_counts(times, t));
        IF c.failing THEN
          DELETE FROM attempts a WHERE a.partition_id = k.partition_id AND a.group_id = k.group_id AND completed @> a.seq;
        END IF;
      END IF;
      IF again > 0 THEN
        INSERT INTO tally_log (queue_id, group_id, retried) VALUES (k.queue_id, k.group_id, again);
      END IF;
      IF failed IS NOT NULL THEN
        given_up := queue_fail(q, k.partition_id, k.group_id, failed, failures, true, false, t);
        c.settled := c.settled + given_up;
        c.failing := true;
        IF q.dead_letter_queue AND q.dlq_after_max_retries THEN buried := buried + given_up; END IF;
      END IF;
      IF direct IS NOT NULL THEN
        given_up := queue_fail(q, k.partition_id, k.group_id, direct, reasons, false, true, t);
        c.settled := c.settled + given_up;
        buried := buried + given_up;
      END IF;

      c.leased := c.leased - answered;
      IF isempty(c.leased) THEN c.next_expiry := NULL; END IF;
      IF array_position(lease_of, NULL) IS NULL THEN  -- by their key: there may be thousands in a shared partition
        WITH over AS (
          DELETE FROM leases l
           WHERE l.lease_id = ANY (lease_of) AND l.partition_id = k.partition_id AND l.group_id = k.group_id
             AND l.open <@ answered
          RETURNING l.lease_id)
        SELECT coalesce(array_agg(lease_id), '{}') INTO ended FROM over;
        IF NOT isempty(c.leased) THEN
          UPDATE leases l SET open = l.open - answered
           WHERE l.lease_id = ANY (lease_of) AND l.partition_id = k.partition_id AND l.group_id = k.group_id
             AND l.open && answered;
        END IF;
      ELSE
        WITH over AS (
          DELETE FROM leases l WHERE l.partition_id = k.partition_id AND l.group_id = k.group_id AND l.queue_id > 0
             AND (l.lease_id = ANY (lease_of) OR l.open && answered) AND l.open <@ answered
          RETURNING l.lease_id)
        SELECT coalesce(array_agg(lease_id), '{}') INTO ended FROM over;
        IF NOT isempty(c.leased) THEN
          UPDATE leases l SET open = l.open - answered
           WHERE l.partition_id = k.partition_id AND l.group_id = k.group_id AND l.queue_id > 0 AND l.open && answered;
        END IF;
      END IF;
      IF cardinality(ended) > 0 THEN c.batches := c.batches + 1; END IF;
      c.due_at := queue_next(c, q);
      PERFORM queue_keep(c);
    END IF;

    RETURN QUERY
      SELECT ords, classes, q.name, k.partition,
             array_agg(CASE WHEN u.class = 'idle' THEN NULL
                            WHEN u.lease_id IS NULL THEN cardinality(ended) > 0 AND u.class = 'ok'
                            ELSE u.lease_id = ANY (ended) END ORDER BY u.place),
             array_agg(coalesce(buried @> u.seq, false) ORDER BY u.place)
        FROM unnest(classes, seqs, lease_of) WITH ORDINALITY AS u (class, seq, lease_id, place);
  END LOOP;
END $$;
