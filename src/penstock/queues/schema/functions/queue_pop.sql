-- queue_pop: answer several pops in one call. Arrays are parallel, one element per request:
--   p_partitions  NULL = any partition of the group's queue;  p_spans  most partitions to take from
--   p_since       do not look at cursors that were due before this (a hint that keeps the scan short; NULL = all)
--   p_back        but look at those since this before saying that there is nothing
--   p_bytes       most bytes of payload of the whole call, unless its first message alone has more
-- Rows with seqs are messages of one partition, in parallel arrays; traces, producers, keys and headers are NULL
-- when none has one. Requests come in any order, the rows of each together; the last one has a note:
--   note  ok, empty, busy (the partition is leased or waiting), unknown (no cursor yet), gone (no such group),
--         more (there may be something, look again at once; also when p_bytes are used up), discovering (another call is looking),
--         locked (another call is taking from what consumers share)
--   wait  when empty: look again in so many seconds, 2 at most (any partition); NULL = nothing known (one partition)
--   due   the moment the first partition it took had become due
-- Planned once per session, like queue_push, with everything it calls.
CREATE FUNCTION queue_pop(
  p_groups int[], p_partitions bigint[], p_batches int[], p_spans int[], p_leases uuid[],
  p_since timestamptz[], p_back timestamptz[], p_bytes bigint
) RETURNS TABLE (
  request int, partition_id bigint, partition text, seqs bigint[], transactions text[], traces uuid[], times timestamptz[],
  producers text[], keys text[], payloads bytea[], headers bytea[], note text, wait double precision, due timestamptz
) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  i int; t timestamptz; next_due timestamptz; c cursors; q queues; g groups; dry int; missing boolean;
  dry_wait double precision; left_over int; claimed int; tries int; found_out int := 0; took record; first_due timestamptz; outcome text;
  served boolean[] := '{}'; places int[]; unserved int; tried int; size bigint;
BEGIN
  FOR i IN 1 .. cardinality(p_groups) LOOP
    IF g.id IS DISTINCT FROM p_groups[i] THEN
      SELECT * INTO g FROM groups WHERE id = p_groups[i];
      missing := NOT FOUND;
      IF NOT missing THEN SELECT * INTO q FROM queues WHERE id = g.queue_id AND deleted_at IS NULL; missing := NOT FOUND; END IF;
    END IF;
    IF missing THEN
      g.id := NULL;
      request := i; note := 'gone'; wait := NULL; due := NULL;
      RETURN NEXT;
      CONTINUE;
    END IF;
    IF p_partitions[i] IS NULL AND p_spans[i] = 1 AND tried IS DISTINCT FROM g.id AND q.competing AND q.window_buffer = 0
       AND q.delayed_processing = 0 AND q.ttl = 0 THEN  -- the usual requests of this group, together
      tried := g.id;
      places := ARRAY(
        SELECT u.place::int FROM unnest(p_groups, p_partitions, p_spans) WITH ORDINALITY u (id, partition_id, span, place)
         WHERE u.id = g.id AND u.partition_id IS NULL AND u.span = 1 ORDER BY u.place);
      note := 'ok'; wait := NULL;
      LOOP
        unserved := cardinality(places);
        FOR request, partition_id, partition, seqs, transactions, traces, times, producers, keys, payloads, headers, size, due IN
          SELECT * FROM queue_pop_shared(g, q, places, p_batches, p_leases, p_since[i], clock_timestamp(), p_bytes)
        LOOP
          served[request] := true;
          places := array_remove(places, request);
          p_bytes := p_bytes - size;
          RETURN NEXT;
        END LOOP;
        -- a shared partition that had less than they want: on with the next
        EXIT WHEN cardinality(places) IN (0, unserved) OR p_bytes <= 0;
      END LOOP;
      seqs := NULL; partition_id := NULL; partition := NULL; transactions := NULL; traces := NULL; times := NULL;
      producers := NULL; keys := NULL; payloads := NULL; headers := NULL;
    END IF;
    CONTINUE WHEN served[i];
    t := clock_timestamp();  -- for each: what the one before left in a shared partition is due since
    left_over := p_batches[i]; claimed := 0; tries := 0; first_due := NULL; outcome := 'empty';
    WHILE left_over > 0 AND claimed < p_spans[i] AND tries < 500 LOOP
      tries := tries + 1;
      IF p_bytes <= 0 THEN
        IF claimed = 0 THEN outcome := 'more'; END IF;
        EXIT;
      END IF;
      IF p_partitions[i] IS NOT NULL THEN
        EXIT WHEN tries > 1;
        SELECT * INTO c FROM cursors k WHERE k.partition_id = p_partitions[i] AND k.group_id = g.id
         ORDER BY k.version DESC LIMIT 1;
        IF NOT FOUND THEN outcome := 'unknown'; EXIT; END IF;
        EXIT WHEN c.due_at IS NULL;
        IF c.due_at > t THEN  -- of what consumers share: perhaps by a call that ended since t
          outcome := CASE WHEN q.competing AND c.due_at <= clock_timestamp() THEN 'locked' ELSE 'busy' END;
          EXIT;
        END IF;
        SELECT * INTO c FROM cursors k WHERE k.partition_id = p_partitions[i] AND k.group_id = g.id AND k.due_at <= t
         ORDER BY k.version DESC LIMIT 1 FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN outcome := CASE WHEN q.competing THEN 'locked' ELSE 'busy' END; EXIT; END IF;
      ELSE
        EXIT WHEN dry = g.id;
        SELECT * INTO c FROM cursors k
         WHERE k.group_id = g.id AND k.due_at >= coalesce(p_since[i], '-infinity') AND k.due_at <= t
         ORDER BY k.due_at LIMIT 1 FOR UPDATE SKIP LOCKED;
        IF NOT FOUND AND p_since[i] IS NOT NULL THEN  -- what was committed late, or was locked for a while
          SELECT * INTO c FROM cursors k
           WHERE k.group_id = g.id AND k.due_at >= p_back[i] AND k.due_at < p_since[i]
           ORDER BY k.due_at LIMIT 1 FOR UPDATE SKIP LOCKED;
        END IF;
        IF NOT FOUND THEN
          IF g.discovered < g.discover_to THEN
            IF found_out >= 10 THEN outcome := 'more'; EXIT; END IF;  -- a long walk: others share this call, so go on in the next
            found_out := found_out + 1;
            SELECT * INTO g FROM queue_discover(g.id, 1000);
            t := clock_timestamp();
            CONTINUE WHEN g.id IS NOT NULL;
            SELECT * INTO g FROM groups WHERE id = p_groups[i];  -- another call is discovering: leave it to that one
            outcome := 'discovering';
            EXIT;
          END IF;
          SELECT min(k.due_at) INTO next_due FROM cursors k  -- what is further ahead may be much, and dead
           WHERE k.group_id = g.id AND k.due_at >= CASE WHEN q.competing THEN coalesce(p_back[i], '-infinity') ELSE t END
             AND k.due_at < t + interval '2 seconds';
          IF q.competing AND next_due <= clock_timestamp() THEN  -- another call takes from it or has since t, and may leave something
            outcome := 'locked';
            EXIT;
          END IF;
          dry := g.id;
          dry_wait := coalesce(extract(epoch FROM next_due - t), 2);
          EXIT;
        END IF;
      END IF;
      took := queue_claim(c, q, left_over, p_bytes, p_leases[i], t);
      IF took.taken IS NOT NULL THEN
        p_bytes := p_bytes - took.size;
        claimed := claimed + 1;
        first_due := coalesce(first_due, c.due_at);
        outcome := 'ok';
        RETURN QUERY
          SELECT i, c.partition_id, (SELECT p.name FROM partitions p WHERE p.id = c.partition_id), a.*, NULL::text,
                 NULL::double precision, NULL::timestamptz
            FROM (
              SELECT array_agg(m.seq), array_agg(m.transaction_id),
                     CASE WHEN count(m.trace_id) > 0 THEN array_agg(m.trace_id) END, array_agg(m.created_at),
                     CASE WHEN count(m.producer) > 0 THEN array_agg(m.producer) END,
                     CASE WHEN count(m.key_id) > 0 THEN array_agg(m.key_id) END, array_agg(m.payload),
                     CASE WHEN count(m.headers) > 0 THEN array_agg(m.headers) END
                FROM unnest(took.taken) r CROSS JOIN LATERAL (
                  SELECT * FROM messages m WHERE m.partition_id = c.partition_id AND m.seq >= lower(r) AND m.seq < upper(r)
                   ORDER BY m.seq LIMIT upper(r) - lower(r)) m HAVING count(*) > 0) a;
        left_over := left_over - (SELECT sum(upper(r) - lower(r)) FROM unnest(took.taken) r);
      END IF;
    END LOOP;
    IF outcome = 'empty' AND tries >= 500 THEN outcome := 'more'; END IF;
    IF p_partitions[i] IS NOT NULL AND outcome <> 'ok' THEN
      SELECT extract(epoch FROM k.due_at - t) INTO dry_wait FROM cursors k
       WHERE k.partition_id = p_partitions[i] AND k.group_id = g.id ORDER BY k.version DESC LIMIT 1;
    END IF;
    request := i; note := outcome; wait := CASE WHEN outcome <> 'ok' THEN dry_wait END; due := first_due;
    RETURN NEXT;
  END LOOP;
END $$;
