-- queue_ack_each: acknowledge messages of one partition for one group, each looked up by its
-- transaction id; the arrays are parallel. The caller locked the cursor, which is all NULL when the
-- group has none there; the queue is all NULL when the partition is gone. Answers what queue_ack does.
CREATE FUNCTION queue_ack_each(
  c cursors, q queues, p_partition bigint, p_items int[], p_transactions text[], p_leases uuid[],
  p_statuses text[], p_errors text[],
  OUT items int[], OUT outcomes text[], OUT released boolean[], OUT dead boolean[]
) LANGUAGE plpgsql AS $$
DECLARE
  t timestamptz := clock_timestamp();
  seqs bigint[]; lease_of uuid[]; ended uuid[] := '{}';
  answered int8multirange; completed int8multirange; n bigint; times timestamptz[]; again bigint;
  failed bigint[]; failures text[]; direct bigint[]; reasons text[];
  given_up int8multirange; buried int8multirange := '{}';
BEGIN
  WITH item AS MATERIALIZED (
    SELECT i.ord, i.status, i.error, i.lease_id, m.seq, m.created_at,
           row_number() OVER (PARTITION BY m.seq ORDER BY i.ord) AS nth
      FROM unnest(p_items, p_transactions, p_leases, p_statuses, p_errors)
             AS i (ord, transaction_id, lease_id, status, error)
      LEFT JOIN LATERAL (
        SELECT m.seq, m.created_at FROM messages m
         WHERE m.partition_id = p_partition AND m.transaction_id = i.transaction_id
           AND hashtextextended(m.transaction_id, 0) = hashtextextended(i.transaction_id, 0)
         LIMIT 1) m ON q.id IS NOT NULL
  ), lease AS MATERIALIZED (
    SELECT l.lease_id, l.open, l.taken FROM leases l
     WHERE l.lease_id = ANY (p_leases) AND l.partition_id = p_partition
       AND l.group_id = c.group_id AND l.expires_at > t
  ), classed AS MATERIALIZED (
    SELECT i.*, CASE
        WHEN i.seq IS NULL THEN 'missing'
        WHEN c.version IS NULL THEN 'idle'
        WHEN c.position >= i.seq OR c.settled @> i.seq THEN
          CASE WHEN i.status = 'completed' OR i.lease_id IS NULL OR l.taken @> i.seq
                 OR EXISTS (SELECT 1 FROM dead_letters d
                             WHERE d.partition_id = p_partition AND d.seq = i.seq
                               AND d.group_id = c.group_id) THEN 'done' ELSE 'lease' END
        WHEN i.lease_id IS NOT NULL AND l.taken @> i.seq IS NOT TRUE THEN 'lease'
        WHEN i.nth > 1 THEN 'done'
        WHEN i.lease_id IS NOT NULL AND NOT l.open @> i.seq THEN
          CASE WHEN i.status = 'completed' AND NOT c.leased @> i.seq THEN 'ok'
               WHEN i.status = 'completed' THEN 'lease' ELSE 'done' END
        WHEN i.status IN ('failed', 'retry') AND NOT c.leased @> i.seq THEN 'done'
        ELSE 'ok' END AS class
      FROM item i LEFT JOIN lease l ON l.lease_id = i.lease_id
  ), ok AS MATERIALIZED (
    SELECT x.seq, x.status, x.error, x.created_at, int8range(x.seq, x.seq + 1) AS range
      FROM classed x WHERE x.class = 'ok'
  )
  SELECT x.*, y.* INTO items, outcomes, seqs, lease_of,
                       answered, completed, n, times, again, failed, failures, direct, reasons
    FROM (SELECT array_agg(x.ord ORDER BY x.ord), array_agg(x.class ORDER BY x.ord),
                 array_agg(x.seq ORDER BY x.ord), array_agg(x.lease_id ORDER BY x.ord)
            FROM classed x) x
   CROSS JOIN (
     SELECT range_agg(y.range), range_agg(y.range) FILTER (WHERE y.status = 'completed'),
            count(*) FILTER (WHERE y.status = 'completed'),
            array_agg(y.created_at ORDER BY y.seq) FILTER (WHERE y.status = 'completed'),
            count(*) FILTER (WHERE y.status = 'retry'),
            array_agg(y.seq ORDER BY y.seq) FILTER (WHERE y.status = 'failed'),
            array_agg(coalesce(y.error, 'Retries exhausted') ORDER BY y.seq)
              FILTER (WHERE y.status = 'failed'),
            array_agg(y.seq ORDER BY y.seq) FILTER (WHERE y.status = 'dlq'),
            array_agg(coalesce(y.error, 'Moved to the dead-letter queue') ORDER BY y.seq)
              FILTER (WHERE y.status = 'dlq')
       FROM ok y) y;

  IF answered IS NOT NULL THEN
    IF completed IS NOT NULL THEN
      c.settled := c.settled + completed;
      c.consumed := c.consumed + n;
      c.consumed_at := t;
      INSERT INTO tally_log (queue_id, group_id, consumed, done, bucket, counts)
      VALUES (c.queue_id, c.group_id, n, n, latency_bucket(t - times[n]), latency_counts(times, t));
      IF c.failing THEN
        DELETE FROM attempts a
         WHERE a.partition_id = p_partition AND a.group_id = c.group_id AND completed @> a.seq;
      END IF;
    END IF;
    IF again > 0 THEN
      INSERT INTO tally_log (queue_id, group_id, retried) VALUES (c.queue_id, c.group_id, again);
    END IF;
    IF failed IS NOT NULL THEN
      given_up := queue_fail(q, p_partition, c.group_id, failed, failures, true, false, t);
      c.settled := c.settled + given_up;
      c.failing := true;
      IF q.dead_letter_queue AND q.dlq_after_max_retries THEN buried := given_up; END IF;
    END IF;
    IF direct IS NOT NULL THEN
      given_up := queue_fail(q, p_partition, c.group_id, direct, reasons, false, true, t);
      c.settled := c.settled + given_up;
      buried := buried + given_up;
    END IF;
    c.leased := c.leased - answered;
    IF isempty(c.leased) THEN c.next_expiry := NULL; END IF;
    ended := queue_close_leases(c, answered, lease_of);
    IF cardinality(ended) > 0 THEN c.batches := c.batches + 1; END IF;
    c.due_at := queue_next(c, q);
    PERFORM queue_keep(c);
  END IF;

  SELECT array_agg(CASE WHEN u.class = 'idle' OR q.id IS NULL THEN NULL
                        WHEN u.lease_id IS NULL THEN cardinality(ended) > 0 AND u.class = 'ok'
                        ELSE u.lease_id = ANY (ended) END ORDER BY u.place),
         array_agg(coalesce(buried @> u.seq, false) ORDER BY u.place)
    INTO released, dead
    FROM unnest(outcomes, seqs, lease_of) WITH ORDINALITY AS u (class, seq, lease_id, place);
END $$;
