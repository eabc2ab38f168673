-- stream_register: register a query by its name. `id` is NULL when the name belongs to a query with another hash and p_reset
-- is false; with p_reset the state of that query is deleted.
CREATE FUNCTION stream_register(
  p_name text, p_source text, p_sink text, p_hash text, p_reset boolean, OUT id uuid, OUT fresh boolean, OUT reset boolean
) LANGUAGE plpgsql AS $$
DECLARE
  q stream_queries;
BEGIN
  INSERT INTO stream_queries (name, source_queue, sink_queue, config_hash) VALUES (p_name, p_source, p_sink, p_hash)
  ON CONFLICT (name) DO NOTHING RETURNING stream_queries.id INTO id;
  fresh := id IS NOT NULL;
  reset := false;
  IF fresh THEN RETURN; END IF;
  SELECT * INTO q FROM stream_queries x WHERE x.name = p_name FOR UPDATE;  -- waits for cycles under way
  IF q.config_hash <> p_hash THEN
    IF NOT p_reset THEN RETURN; END IF;
    DELETE FROM stream_state s WHERE s.query_id = q.id;
    reset := true;
  END IF;
  id := q.id;
  UPDATE stream_queries x SET source_queue = p_source, sink_queue = p_sink, config_hash = p_hash, updated_at = clock_timestamp()
   WHERE x.id = q.id;
END $$;

-- stream_begin: check what a cycle needs, and keep it until the transaction ends. The caller has locked the cursor that the
-- cycle acknowledges. p_hash NULL: the caller does not say which program it is. p_lease NULL: the cycle acknowledges nothing.
-- `problem` is query, hash, partition, lease, shared (the queue lets consumers share a partition, so two could compute from
-- the same state) or message. Otherwise `covered` are the transaction ids of the messages that are open under the lease up to
-- the message p_transaction, in order, and `rest` are those behind it.
CREATE FUNCTION stream_begin(
  p_query uuid, p_hash text, p_partition bigint, p_group text, p_lease uuid, p_transaction text,
  OUT problem text, OUT covered text[], OUT rest text[]
) LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
  q stream_queries; open int8multirange; shared boolean; last bigint;
BEGIN
  SELECT * INTO q FROM stream_queries x WHERE x.id = p_query FOR KEY SHARE;  -- a reset waits
  IF NOT FOUND THEN problem := 'query'; RETURN; END IF;
  IF q.config_hash <> p_hash THEN problem := 'hash'; RETURN; END IF;
  PERFORM 1 FROM partitions p WHERE p.id = p_partition FOR KEY SHARE;  -- it is not removed while it gets state
  IF NOT FOUND THEN problem := 'partition'; RETURN; END IF;
  PERFORM pg_advisory_xact_lock(hashtextextended('stream ' || p_query || p_partition, 0));  -- for cycles without a lease
  IF p_lease IS NULL THEN RETURN; END IF;

  SELECT l.open, s.competing INTO open, shared
    FROM leases l JOIN groups g ON g.id = l.group_id JOIN queues s ON s.id = l.queue_id
   WHERE l.lease_id = p_lease AND l.partition_id = p_partition AND g.name = p_group AND l.expires_at > clock_timestamp();
  IF NOT FOUND THEN problem := 'lease'; RETURN; END IF;
  IF shared THEN problem := 'shared'; RETURN; END IF;
  SELECT m.seq INTO last FROM message_named(p_partition, p_transaction) m;
  IF open @> last IS NOT TRUE THEN problem := 'message'; RETURN; END IF;
  SELECT coalesce(array_agg(m.transaction_id ORDER BY m.seq) FILTER (WHERE m.seq <= last), '{}'),
         coalesce(array_agg(m.transaction_id ORDER BY m.seq) FILTER (WHERE m.seq > last), '{}')
    INTO covered, rest
    FROM unnest(open) r CROSS JOIN LATERAL (
      SELECT m.seq, m.transaction_id FROM messages m
       WHERE m.partition_id = p_partition AND m.seq >= lower(r) AND m.seq < upper(r) ORDER BY m.seq) m;
END $$;

-- stream_apply: change the state of a query in a partition: a value for each key, NULL to delete it. p_kept is a lease that
-- stays with the messages which the cycle did not acknowledge.
CREATE FUNCTION stream_apply(p_query uuid, p_partition bigint, p_keys text[], p_values text[], p_kept uuid) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
  DELETE FROM stream_state s USING unnest(p_keys, p_values) u (key, value)
   WHERE s.partition_id = p_partition AND s.query_id = p_query AND s.key = u.key AND u.value IS NULL;
  INSERT INTO stream_state (partition_id, query_id, key, value, updated_at)
  SELECT p_partition, p_query, u.key, u.value::jsonb, clock_timestamp()
    FROM unnest(p_keys, p_values) u (key, value) WHERE u.value IS NOT NULL
  ON CONFLICT (partition_id, query_id, key) DO UPDATE SET value = excluded.value, updated_at = excluded.updated_at;
  UPDATE leases l SET kept = true WHERE l.lease_id = p_kept AND l.partition_id = p_partition;
END $$;
