-- outbox_apply: push and acknowledge what this transaction asked for; called by its commit (the trigger outbox_commit).
-- So the locks of partitions and cursors are held no longer than by a push of a broker, however long the transaction was.
-- They are taken in the order that all follow: partitions by id, then cursors. Wakes waiting pops by NOTIFY, which
-- PostgreSQL sends when the commit is done.
CREATE FUNCTION outbox_apply() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  operations outbox[];
  queue_names text[]; partition_names text[];  -- of the distinct partitions pushed to
  unordered text[];  -- the queues pushed to without a partition
  pushed record; acked record; bad text; statuses text[]; dues timestamptz[]; affected text[]; payload text;
BEGIN
  WITH taken AS (DELETE FROM outbox o WHERE o.xid = pg_current_xact_id() RETURNING o)
  SELECT array_agg(t.o ORDER BY (t.o).id) INTO operations FROM taken t;

  SELECT coalesce(array_agg(DISTINCT o.queue), '{}') INTO unordered
    FROM unnest(operations) o WHERE o.queue IS NOT NULL AND o.partition IS NULL;
  SELECT array_agg(d.queue), array_agg(d.partition) INTO queue_names, partition_names
    FROM (SELECT DISTINCT o.queue, coalesce(o.partition, 'Default') AS partition
            FROM unnest(operations) o WHERE o.queue IS NOT NULL) d;
  IF EXISTS (
    SELECT 1 FROM unnest(queue_names, partition_names) u (queue, partition)
     WHERE NOT EXISTS (SELECT 1 FROM queues q JOIN partitions p ON p.queue_id = q.id
                        WHERE q.name = u.queue AND q.deleted_at IS NULL AND p.name = u.partition)) THEN
    -- those that are there come first: who holds a partition may wait for its queue, never the other way round
    PERFORM 1 FROM partitions p
     WHERE p.id IN (SELECT e.id FROM unnest(queue_names, partition_names) u (queue, partition)
                      JOIN queues q ON q.name = u.queue AND q.deleted_at IS NULL
                      JOIN partitions e ON e.queue_id = q.id AND e.name = u.partition)
     ORDER BY p.id FOR NO KEY UPDATE;
    PERFORM queue_ensure(queue_names, partition_names, unordered);
  END IF;

  -- the first of those with the same transaction id, by partition and in the order of the calls
  WITH item AS MATERIALIZED (
    SELECT i.*, row_number() OVER before AS ord, (1 + sum(octet_length(i.payload)) OVER before)::int AS payload_bound,
           (1 + sum(coalesce(octet_length(i.headers), 0)) OVER before)::int AS header_bound
      FROM (SELECT DISTINCT ON (p.id, o.transaction_id) p.id AS target, o.*
              FROM unnest(operations) o JOIN queues q ON q.name = o.queue AND q.deleted_at IS NULL
              JOIN partitions p ON p.queue_id = q.id AND p.name = coalesce(o.partition, 'Default')
             ORDER BY p.id, o.transaction_id, o.id) i
    WINDOW before AS (ORDER BY i.target, i.id))
  SELECT l.ids, l.starts, array_agg(i.transaction_id ORDER BY i.ord) AS transactions, bool_or(i.checked) AS checked,
         CASE WHEN count(i.trace_id) > 0 THEN array_agg(i.trace_id ORDER BY i.ord) END AS traces,
         string_agg(i.headers, '' ORDER BY i.ord) AS headers, 1 || array_agg(i.header_bound ORDER BY i.ord) AS header_bounds,
         CASE WHEN count(i.deliver_at) > 0 THEN array_agg(i.deliver_at ORDER BY i.ord) END AS dues,
         CASE WHEN count(i.delay) > 0 THEN array_agg(i.delay ORDER BY i.ord) END AS delays,
         string_agg(i.payload, '' ORDER BY i.ord) AS payloads,
         1 || array_agg(i.payload_bound ORDER BY i.ord) AS payload_bounds, array_agg(i.queue ORDER BY i.ord) AS queues
    INTO pushed
    FROM item i
   CROSS JOIN (SELECT array_agg(x.target ORDER BY x.target) AS ids, array_agg(x.start ORDER BY x.target) AS starts
                 FROM (SELECT i.target, (min(i.ord) - 1)::int AS start FROM item i GROUP BY 1) x) l
   GROUP BY l.ids, l.starts;
  SELECT array_agg(o.partition_id ORDER BY o.id) AS partitions, array_agg(o.group_name ORDER BY o.id) AS groups,
         array_agg(o.lease_id ORDER BY o.id) AS leases, array_agg(o.status ORDER BY o.id) AS statuses,
         array_agg(o.error ORDER BY o.id) AS errors, array_agg(o.transaction_id ORDER BY o.id) AS transactions,
         array_agg((o.nth - 1)::int ORDER BY o.id) AS starts
    INTO acked
    FROM (SELECT o.*, row_number() OVER (ORDER BY o.id) AS nth FROM unnest(operations) o WHERE o.queue IS NULL) o;

  IF pushed.ids IS NOT NULL AND acked.partitions IS NOT NULL THEN
    PERFORM queue_lock(pushed.ids, acked.partitions, acked.groups);
  END IF;
  IF queue_names IS NOT NULL THEN
    SELECT r.statuses, r.due_ats INTO statuses, dues
      FROM append(p_ids => pushed.ids, p_starts => pushed.starts, p_transactions => pushed.transactions,
                  p_checked => pushed.checked, p_traces => pushed.traces, p_producers => NULL, p_keys => NULL,
                  p_payloads => pushed.payloads, p_payload_bounds => pushed.payload_bounds,
                  p_headers => pushed.headers, p_header_bounds => pushed.header_bounds, p_due_ats => pushed.dues,
                  p_delays => pushed.delays) r;
    SELECT u.queue INTO bad FROM unnest(pushed.queues, statuses) u (queue, status) WHERE u.status = 'full' LIMIT 1;
    IF FOUND THEN
      RAISE EXCEPTION USING ERRCODE = 'PQ002', MESSAGE = format('queue "%s" is full', bad),
        HINT = 'Its maxSize is reached. Nothing of this transaction is committed.';
    END IF;
    SELECT u.queue INTO bad FROM unnest(pushed.queues, statuses) u (queue, status) WHERE u.status = 'stale' LIMIT 1;
    IF bad IS NOT NULL OR pushed.ids IS NULL OR cardinality(pushed.ids) < cardinality(queue_names) THEN
      RAISE serialization_failure USING
        MESSAGE = format('queue "%s" was deleted or encrypted during this transaction', coalesce(bad, queue_names[1])),
        HINT = 'Run the transaction again.';
    END IF;
  END IF;
  affected := coalesce(queue_names, '{}');

  IF acked.partitions IS NOT NULL THEN
    FOR pushed IN  -- a run is one message here
      SELECT * FROM settle(p_starts => acked.starts, p_partitions => acked.partitions, p_groups => acked.groups,
                           p_leases => acked.leases, p_statuses => acked.statuses, p_errors => acked.errors,
                           p_transactions => acked.transactions)
    LOOP
      IF pushed.outcomes[1] <> 'ok' THEN
        PERFORM outbox_lease_lost(acked.transactions[pushed.runs[1]]);
      END IF;
      affected := affected || pushed.queue;
    END LOOP;
  END IF;

  SELECT json_build_array('outbox', false, json_agg(d.entry))::text INTO payload
    FROM (SELECT json_build_array(q, 16) AS entry FROM (SELECT DISTINCT q FROM unnest(affected) q) q
          UNION ALL  -- who delivers what is for later may have to do so earlier
          SELECT json_build_array('', extract(epoch FROM min(l))) FROM unnest(dues) l HAVING count(l) > 0) d;
  PERFORM pg_notify('penstock_queues',
                    CASE WHEN octet_length(payload) > 7000 THEN '["outbox", false, null]' ELSE payload END);
END $$;
