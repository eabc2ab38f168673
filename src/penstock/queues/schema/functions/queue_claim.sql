-- queue_claim: take up to p_want messages for a group from one partition, with no more than p_bytes of payload unless the
-- first alone has more. The caller locked the cursor `c`, which is due.
-- They are taken under the lease p_lease; one with a lease_time of 0 lives 60 s, as clients of the original expect.
-- Answers the sequence numbers taken, NULL when there are none, and the bytes of their payloads as they are stored; in every
-- case the cursor knows when to be looked at next.
CREATE FUNCTION queue_claim(
  c cursors, q queues, p_want int, p_bytes bigint, p_lease uuid, p_now timestamptz,
  OUT taken int8multirange, OUT size bigint
) LANGUAGE plpgsql AS $$
DECLARE
  free int8multirange; lost int8multirange; stale int8multirange; last record;
  n bigint := 0; seqs bigint[]; hi bigint; cut bigint; head bigint; skipped bigint; expires timestamptz;
BEGIN
  IF c.next_expiry <= p_now THEN
    WITH gone AS MATERIALIZED (
      DELETE FROM leases l
       WHERE l.partition_id = c.partition_id AND l.group_id = c.group_id AND l.queue_id > 0 AND l.expires_at <= p_now
      RETURNING l.open)
    SELECT range_agg(r) INTO lost FROM gone, unnest(gone.open) r;
    SELECT min(l.expires_at) INTO c.next_expiry FROM leases l
     WHERE l.partition_id = c.partition_id AND l.group_id = c.group_id AND l.queue_id > 0;
    IF lost IS NOT NULL THEN
      c.leased := c.leased - lost;
      c.failing := true;
      c.settled := c.settled + coalesce((
        SELECT queue_fail(q, c.partition_id, c.group_id, array_agg(m.seq ORDER BY m.seq),
                          array_agg('the lease expired before the message was acknowledged'::text), false, false, p_now)
          FROM unnest(lost) r, LATERAL (SELECT m.seq FROM messages m WHERE m.partition_id = c.partition_id
                                           AND m.seq >= lower(r) AND m.seq < upper(r)
                                         ORDER BY m.seq LIMIT upper(r) - lower(r)) m
        HAVING count(*) > 0), '{}');
    END IF;
  END IF;

  IF c.position < 0 AND c.start_at <= p_now THEN
    -- What is skipped is counted, so nobody may be deleting it: only with the partition's lock, else soon.
    PERFORM 1 FROM partitions WHERE id = c.partition_id FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
      c.due_at := clock_timestamp();
      PERFORM queue_keep(c);
      RETURN;
    END IF;
    c.position := queue_seq_at(c.partition_id, c.start_at);
    SELECT count(*) INTO skipped FROM messages m WHERE m.partition_id = c.partition_id AND m.seq <= c.position;
    IF skipped > 0 THEN
      INSERT INTO tally_log (queue_id, group_id, consumed) VALUES (c.queue_id, c.group_id, skipped);
    END IF;
  END IF;

  IF c.position < 0 THEN
    c.due_at := c.start_at;
  ELSIF NOT q.competing AND NOT isempty(c.leased) THEN
    c.due_at := c.next_expiry;
  ELSE
    SELECT m.seq, m.created_at INTO last FROM messages m WHERE m.partition_id = c.partition_id
     ORDER BY m.seq DESC LIMIT 1;
    IF NOT FOUND THEN
      SELECT floor AS seq, NULL::timestamptz AS created_at INTO last FROM partitions WHERE id = c.partition_id;
      c.position := greatest(c.position, coalesce(last.seq, 0));
    END IF;
    head := greatest(c.position, last.seq);
    IF q.window_buffer > 0 AND last.created_at + make_interval(secs => q.window_buffer) > p_now THEN
      c.due_at := last.created_at + make_interval(secs => q.window_buffer);
    ELSE
      free := int8multirange(int8range(c.position + 1, head + 1)) - c.settled - c.leased;
      IF c.failing AND NOT isempty(free) THEN
        IF q.competing THEN
          free := free - coalesce((SELECT range_agg(int8range(a.seq, a.seq + 1)) FROM attempts a
            WHERE a.partition_id = c.partition_id AND a.group_id = c.group_id AND a.retry_at > p_now), '{}');
        ELSE  -- strict order: nothing beyond a message that must wait
          SELECT min(a.seq) INTO cut FROM attempts a
           WHERE a.partition_id = c.partition_id AND a.group_id = c.group_id AND a.retry_at > p_now;
          IF cut IS NOT NULL THEN free := free * int8multirange(int8range(NULL, cut)); END IF;
        END IF;
      END IF;
      IF q.ttl > 0 AND NOT isempty(free) THEN
        IF EXISTS (SELECT 1 FROM messages m WHERE m.partition_id = c.partition_id AND m.seq >= lower(free)
                     AND m.seq = (SELECT min(f.seq) FROM messages f WHERE f.partition_id = c.partition_id AND f.seq >= lower(free))
                     AND m.created_at <= p_now - make_interval(secs => q.ttl)) THEN
          stale := free * int8multirange(int8range(NULL, queue_seq_at(c.partition_id, p_now - make_interval(secs => q.ttl)) + 1));
          SELECT count(*) INTO skipped FROM unnest(stale) r, LATERAL (
            SELECT 1 FROM messages m WHERE m.partition_id = c.partition_id AND m.seq >= lower(r) AND m.seq < upper(r)
             ORDER BY m.seq LIMIT upper(r) - lower(r)) m;
          INSERT INTO tally_log (queue_id, group_id, consumed, done, dropped)
          VALUES (c.queue_id, c.group_id, skipped, skipped, skipped);
          c.settled := c.settled + stale;
          free := free - stale;
        END IF;
      END IF;
      SELECT array_agg(m.seq), count(*), max(m.seq), sum(m.size) INTO seqs, n, hi, size
        FROM (SELECT m.seq, m.size FROM unnest(free) r CROSS JOIN LATERAL (
                SELECT m.seq, octet_length(m.payload) AS size FROM messages m
                 WHERE m.partition_id = c.partition_id AND m.seq >= lower(r) AND m.seq < upper(r)
                   AND (q.delayed_processing = 0 OR m.created_at <= p_now - make_interval(secs => q.delayed_processing))
                 ORDER BY m.seq LIMIT p_want) m LIMIT p_want) m;
      IF size > p_bytes AND n > 1 THEN
        SELECT array_agg(m.seq), count(*), max(m.seq), sum(m.size) INTO seqs, n, hi, size
          FROM (SELECT m.seq, octet_length(m.payload) AS size, sum(octet_length(m.payload)) OVER (ORDER BY m.seq) AS upto,
                       row_number() OVER (ORDER BY m.seq) AS nth
                  FROM unnest(seqs) s (seq) JOIN messages m ON m.partition_id = c.partition_id AND m.seq = s.seq) m
         WHERE m.upto <= p_bytes OR m.nth = 1;
        p_want := n;  -- there is more
      END IF;
      IF n > 0 THEN
        IF hi - seqs[1] = n - 1 THEN
          taken := int8multirange(int8range(seqs[1], hi + 1));
        ELSE
          SELECT range_agg(int8range(s.seq, s.seq + 1)) INTO taken FROM unnest(seqs) s (seq);
        END IF;
        c.settled := c.settled + (free * int8multirange(int8range(NULL, hi + 1)) - taken);  -- numbers with no message
        expires := p_now + make_interval(secs => CASE WHEN q.lease_time > 0 THEN q.lease_time ELSE 60 END);
        INSERT INTO leases (lease_id, partition_id, group_id, queue_id, taken_at, expires_at, taken, open)
        VALUES (p_lease, c.partition_id, c.group_id, c.queue_id, p_now, expires, taken, taken);
        c.leased := c.leased + taken;
        c.lease_id := p_lease;
        c.next_expiry := least(c.next_expiry, expires);
      END IF;

      IF NOT q.competing AND n > 0 THEN
        c.due_at := expires;
      ELSIF n >= p_want THEN
        c.due_at := clock_timestamp();
      ELSE
        last := NULL;
        IF q.delayed_processing > 0 THEN  -- is there a message that is free but not due yet?
          SELECT m.seq, m.created_at INTO last FROM unnest(free - coalesce(taken, '{}')) r CROSS JOIN LATERAL (
            SELECT m.seq, m.created_at FROM messages m
             WHERE m.partition_id = c.partition_id AND m.seq >= lower(r) AND m.seq < upper(r) ORDER BY m.seq LIMIT 1) m LIMIT 1;
        END IF;
        IF last IS NOT NULL THEN
          c.due_at := least(c.next_expiry, last.created_at + make_interval(secs => q.delayed_processing));
        ELSIF cut IS NOT NULL THEN
          SELECT a.retry_at INTO c.due_at FROM attempts a
           WHERE a.partition_id = c.partition_id AND a.group_id = c.group_id AND a.seq = cut;
        ELSE
          c.settled := c.settled + (free - coalesce(taken, '{}'));
          c.due_at := queue_rest(c.partition_id, c.group_id, head, c.failing, c.next_expiry);
        END IF;
      END IF;
    END IF;
  END IF;

  PERFORM queue_keep(c);
END $$;
