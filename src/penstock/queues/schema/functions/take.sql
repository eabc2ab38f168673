-- take: lease messages to pops.
--
-- The arrays have one element per pop. Pops that take from any one partition come first; those of a group are together.
--   p_groups       the group that pops
--   p_batches      how many messages at most
--   p_leases       the id of the lease that it gets
--   p_since        leave out cursors that were due before this: a hint that keeps the scan short while vacuum is held back
--                  and the index is full of dead entries. NULL: scan all. The same for all pops of a group
--   p_partitions   the one partition to take from. NULL: any, or any for all of them
--   p_spans        from how many partitions at most. NULL: one, or one for all of them
--   p_max_bytes    of payload and headers for all pops together, unless the first message alone has more
--   p_hand_off     a push takes for pops that wait: serve what the first statement serves and say nothing of the others
-- Returns the rows of each pop together (type taken); the last one has its outcome:
--   ok, empty; busy (the partition is leased, or waits for its time); gone (no such group, or it has no cursor there);
--   more (there may be something, poll again at once); locked (another call is at it, poll again soon)
--
-- A cursor is claimed with SKIP LOCKED, so a pop waits for nobody. What is taken is leased: the cursor is not due before the
-- lease expires, or before the next message where consumers share a partition (`ordering: none`, take_shared).
-- Planned once per session, like append, with everything that it calls (docs/decisions/queues.md).
CREATE TYPE taken AS (
  request      int,               -- the number of the pop among the arguments, from 1
  outcome      text,              -- NULL: more rows of this pop follow
  wait         double precision,  -- when it got nothing: poll again in so many seconds, as far as the database knows
  due_at       timestamptz,       -- when its cursor had become due
  partition_id bigint,            -- NULL: it got nothing
  partition    text,
  version      bigint,            -- of the cursor, where this lease is all that the cursor has beyond its position
  seqs         bigint[],          -- parallel, in the order of the partition; traces, producers, keys and headers are NULL
  transactions text[],            -- when no message has one
  traces       uuid[],
  times        double precision[],  -- when they were created, in seconds since 1970: the driver encodes timestamps slowly
  producers    text[],
  keys         text[],
  payloads     bytea[],
  headers      bytea[],
  attempts     int[]              -- that have failed; NULL: none of any message
);
CREATE FUNCTION take(
  p_groups int[], p_batches int[], p_leases uuid[], p_since timestamptz[], p_partitions bigint[], p_spans int[],
  p_max_bytes bigint, p_hand_off boolean
) RETURNS SETOF taken LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET max_parallel_workers_per_gather = 0
AS $$
#variable_conflict use_column
DECLARE
  t timestamptz := clock_timestamp(); served int; r taken; g groups; q queues; c cursors; next_due timestamptz;
  pops int[]; shared_of int; empty_of int; empty_wait double precision; steps int := 0;
  i int; rest int; claims int; tries int; got record; due timestamptz; outcome text;
BEGIN
  -- The common case, for the pops of all groups at once: ordered partitions whose cursor has nothing but a position, of queues
  -- without an option that delays or drops messages (the condition of take_shared below is the same). The n-th pop of a group
  -- gets the n-th cursor that is due.
  RETURN QUERY
  WITH due AS MATERIALIZED (
    SELECT k.*, q.id AS queue_id, t + make_interval(secs => CASE WHEN q.lease_time > 0 THEN q.lease_time ELSE 60 END) AS expires_at
      FROM (SELECT u.group_id, min(u.pop) - 1 AS start, count(*) AS n, min(u.since) AS since
              FROM unnest(p_groups, p_since, p_partitions, p_spans) WITH ORDINALITY u (group_id, since, partition_id, span, pop)
             WHERE u.partition_id IS NULL AND coalesce(u.span, 1) = 1 GROUP BY 1) w
      JOIN groups g ON g.id = w.group_id
      JOIN queues q ON q.id = g.queue_id AND q.deleted_at IS NULL AND NOT q.competing AND q.window_buffer = 0
       AND q.delayed_processing = 0 AND q.ttl = 0
     CROSS JOIN LATERAL (
       SELECT k.*, w.group_id, (w.start + row_number() OVER ())::int AS pop
         FROM (SELECT c.ctid AS row, c.partition_id, c.version, c.position, c.due_at,
                      c.position >= 0 AND NOT c.failing AND isempty(c.leased) AND isempty(c.settled) AS simple
                 FROM cursors c
                WHERE c.group_id = w.group_id AND c.due_at >= coalesce(w.since, '-infinity') AND c.due_at <= t
                ORDER BY c.due_at LIMIT w.n FOR UPDATE SKIP LOCKED) k
        WHERE k.simple) k
  ), batch AS MATERIALIZED (
    SELECT d.*, p_leases[d.pop] AS lease_id, m.*
      FROM due d CROSS JOIN LATERAL messages_after(d.partition_id, d.position, p_batches[d.pop]) m
     WHERE m.last = d.position + m.n AND m.size <= p_max_bytes / cardinality(p_groups)
  ), claimed AS (
    UPDATE cursors c
       SET version = c.version + 1, leased = int8multirange(int8range(b.position + 1, b.last + 1)), due_at = b.expires_at,
           next_expiry = b.expires_at, lease_id = b.lease_id
      FROM batch b
     WHERE c.ctid = b.row AND c.version = b.version
    RETURNING b.*, c.leased, c.version AS version_now
  ), leased AS (
    INSERT INTO leases (lease_id, partition_id, group_id, queue_id, taken_at, expires_at, taken, open)
    SELECT x.lease_id, x.partition_id, x.group_id, x.queue_id, t, x.expires_at, x.leased, x.leased FROM claimed x
  )
  SELECT x.pop, 'ok', NULL::double precision, x.due_at, x.partition_id,
         (SELECT p.name FROM partitions p WHERE p.id = x.partition_id), x.version_now, x.seqs, x.transactions, x.traces, x.times,
         x.producers, x.keys, x.payloads, x.headers, NULL::int[]
    FROM claimed x;
  GET DIAGNOSTICS served = ROW_COUNT;
  IF served = cardinality(p_groups) OR p_hand_off THEN RETURN; END IF;
  p_max_bytes := p_max_bytes - p_max_bytes / cardinality(p_groups) * served;

  -- Every other pop by itself.
  FOR i IN 1 .. cardinality(p_groups) LOOP
    CONTINUE WHEN served > 0 AND EXISTS (SELECT 1 FROM leases l WHERE l.lease_id = p_leases[i]);
    IF g.id IS DISTINCT FROM p_groups[i] THEN
      SELECT x.* INTO g FROM groups x WHERE x.id = p_groups[i];
      SELECT x.* INTO q FROM queues x WHERE x.id = g.queue_id AND x.deleted_at IS NULL;
    END IF;
    IF q.id IS NULL THEN
      r := NULL; r.request := i; r.outcome := 'gone';
      RETURN NEXT r;
      CONTINUE;
    END IF;
    IF q.competing AND shared_of IS DISTINCT FROM g.id AND q.window_buffer = 0 AND q.delayed_processing = 0 AND q.ttl = 0 THEN
      shared_of := g.id;
      pops := ARRAY(SELECT u.pop FROM unnest(p_groups, p_partitions, p_spans) WITH ORDINALITY u (id, partition_id, span, pop)
                     WHERE u.id = g.id AND u.partition_id IS NULL AND coalesce(u.span, 1) = 1 ORDER BY u.pop);
      WHILE cardinality(pops) > 0 AND p_max_bytes > 0 LOOP  -- a partition that had less than they want: on with the next
        rest := cardinality(pops);
        FOR r IN SELECT * FROM take_shared(g, q, pops, p_batches, p_leases, p_since[i], clock_timestamp(), p_max_bytes) LOOP
          pops := array_remove(pops, r.request::bigint::int);
          p_max_bytes := p_max_bytes - (SELECT sum(octet_length(b)) FROM unnest(r.payloads) b);
          served := served + 1;
          RETURN NEXT r;
        END LOOP;
        EXIT WHEN cardinality(pops) = rest;
      END LOOP;
      CONTINUE WHEN served > 0 AND EXISTS (SELECT 1 FROM leases l WHERE l.lease_id = p_leases[i]);
    END IF;
    t := clock_timestamp();  -- what the pop before left in a shared partition is due since
    rest := p_batches[i]; claims := 0; tries := 0; due := NULL; outcome := 'empty';
    WHILE rest > 0 AND claims < coalesce(p_spans[i], 1) AND tries < 500 LOOP
      tries := tries + 1;
      IF p_max_bytes <= 0 THEN
        IF claims = 0 THEN outcome := 'more'; END IF;
        EXIT;
      END IF;
      IF p_partitions[i] IS NOT NULL THEN
        EXIT WHEN tries > 1;
        SELECT x.* INTO c FROM cursors x WHERE x.partition_id = p_partitions[i] AND x.group_id = g.id
         ORDER BY x.version DESC LIMIT 1;
        IF NOT FOUND THEN outcome := 'gone'; EXIT; END IF;
        EXIT WHEN c.due_at IS NULL;
        IF c.due_at > t THEN  -- of what consumers share: perhaps by a call that ended since t
          outcome := CASE WHEN q.competing AND c.due_at <= clock_timestamp() THEN 'locked' ELSE 'busy' END;
          EXIT;
        END IF;
        SELECT x.* INTO c FROM cursors x WHERE x.partition_id = p_partitions[i] AND x.group_id = g.id AND x.due_at <= t
         ORDER BY x.version DESC LIMIT 1 FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN outcome := CASE WHEN q.competing THEN 'locked' ELSE 'busy' END; EXIT; END IF;
      ELSE
        EXIT WHEN empty_of = g.id;
        -- two seconds further back than the hint: what was committed late, or was locked for a while
        SELECT x.* INTO c FROM cursors x
         WHERE x.group_id = g.id AND x.due_at >= coalesce(p_since[i] - interval '2 s', '-infinity') AND x.due_at <= t
         ORDER BY x.due_at LIMIT 1 FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
          IF g.discovered < g.discover_to THEN
            IF steps >= 10 THEN outcome := 'more'; EXIT; END IF;  -- a long walk: others share this call, so the next continues it
            steps := steps + 1;
            SELECT x.* INTO g FROM queue_discover(g.id, 1000) x;
            t := clock_timestamp();
            CONTINUE WHEN g.id IS NOT NULL;
            SELECT x.* INTO g FROM groups x WHERE x.id = p_groups[i];
            outcome := 'locked';
            EXIT;
          END IF;
          SELECT min(x.due_at) INTO next_due FROM cursors x  -- what is further ahead may be much, and dead
           WHERE x.group_id = g.id AND x.due_at < t + interval '2 s'
             AND x.due_at >= CASE WHEN q.competing THEN coalesce(p_since[i] - interval '2 s', '-infinity') ELSE t END;
          IF q.competing AND next_due <= clock_timestamp() THEN  -- another call takes from it, or has since t, and may leave something
            outcome := 'locked';
            EXIT;
          END IF;
          empty_of := g.id;
          empty_wait := coalesce(extract(epoch FROM next_due - t), 2);
          EXIT;
        END IF;
      END IF;
      got := take_from(c, q, rest, p_max_bytes, p_leases[i], t);
      CONTINUE WHEN got.taken IS NULL;
      outcome := 'ok';
      claims := claims + 1;
      due := coalesce(due, c.due_at);
      p_max_bytes := p_max_bytes - got.size;
      rest := rest - (SELECT sum(upper(x) - lower(x)) FROM unnest(got.taken) x);
      RETURN QUERY
        SELECT i, NULL::text, NULL::double precision, NULL::timestamptz, c.partition_id,
               (SELECT p.name FROM partitions p WHERE p.id = c.partition_id), NULL::bigint, m.seqs, m.transactions, m.traces,
               m.times, m.producers, m.keys, m.payloads, m.headers,
               CASE WHEN c.failing OR c.next_expiry <= t THEN ARRAY(SELECT coalesce(a.attempts, 0) FROM unnest(m.seqs) WITH ORDINALITY s (seq, ord)
                 LEFT JOIN attempts a ON a.partition_id = c.partition_id AND a.group_id = g.id AND a.seq = s.seq ORDER BY s.ord) END
          FROM unnest(got.taken) x
         CROSS JOIN LATERAL (SELECT count(*) AS n FROM messages y  -- fewer when some were deleted since take_from read them
                              WHERE y.partition_id = c.partition_id AND y.seq >= lower(x) AND y.seq < upper(x)) there
         CROSS JOIN LATERAL messages_after(c.partition_id, lower(x) - 1, there.n) m
         WHERE there.n > 0;
    END LOOP;
    IF outcome = 'empty' AND tries >= 500 THEN outcome := 'more'; END IF;
    IF p_partitions[i] IS NOT NULL AND outcome <> 'ok' THEN
      SELECT extract(epoch FROM x.due_at - t) INTO empty_wait FROM cursors x
       WHERE x.partition_id = p_partitions[i] AND x.group_id = g.id ORDER BY x.version DESC LIMIT 1;
    END IF;
    r := NULL; r.request := i; r.outcome := outcome; r.due_at := due;
    IF outcome <> 'ok' THEN r.wait := empty_wait; END IF;
    RETURN NEXT r;
  END LOOP;
END $$;
