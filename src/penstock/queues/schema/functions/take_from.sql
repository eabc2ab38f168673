-- take_from: take messages for a group from one partition, whatever state its cursor is in: expired leases, failed messages,
-- messages that wait for their time or are too old, gaps. The caller locked the cursor `c`, which is due; a pop over several
-- partitions calls this for each.
--   p_want    how many at most;  p_max_bytes  of payload and headers, unless the first alone has more
--   p_lease   the lease; with a lease_time of 0 it lives 60 s, as clients of Queen MQ expect
-- Returns the numbers taken, NULL when there are none, and their bytes. In any case the cursor gets its next due time.
-- A cursor whose partition is gone is deleted: queue_tidy removed the partition while queue_cursors, which does not wait for
-- it, gave the group its cursor.
CREATE FUNCTION take_from(
  c cursors, q queues, p_want int, p_max_bytes bigint, p_lease uuid, p_now timestamptz,
  OUT taken int8multirange, OUT size bigint
) LANGUAGE plpgsql AS $$
DECLARE
  free int8multirange; last record; n bigint := 0; seqs bigint[]; hi bigint; head bigint; more boolean;
  retry_at timestamptz;  -- strict order: when the first message that must wait is free, and all that is beyond it
  expires timestamptz;
BEGIN
  IF c.next_expiry <= p_now THEN c := queue_expire(c, q, p_now); END IF;
  IF c.position < 0 AND c.start_at <= p_now THEN c := queue_start(c); END IF;
  IF c.position < 0 THEN
    IF NOT EXISTS (SELECT 1 FROM partitions p WHERE p.id = c.partition_id) THEN
      DELETE FROM cursors k WHERE k.partition_id = c.partition_id AND k.group_id = c.group_id;
      RETURN;
    END IF;
    c.due_at := greatest(c.start_at, clock_timestamp());
    PERFORM queue_keep(c);
    RETURN;
  END IF;
  IF NOT q.competing AND NOT isempty(c.leased) THEN
    c.due_at := c.next_expiry;
    PERFORM queue_keep(c);
    RETURN;
  END IF;

  SELECT m.seq, m.created_at INTO last FROM messages m WHERE m.partition_id = c.partition_id
   ORDER BY m.seq DESC LIMIT 1;
  IF NOT FOUND THEN
    SELECT floor AS seq, NULL::timestamptz AS created_at INTO last FROM partitions
     WHERE id = c.partition_id;
    IF NOT FOUND THEN
      DELETE FROM cursors k WHERE k.partition_id = c.partition_id AND k.group_id = c.group_id;
      RETURN;
    END IF;
    c.position := greatest(c.position, last.seq);
  END IF;
  head := greatest(c.position, last.seq);
  IF q.window_buffer > 0 AND last.created_at + make_interval(secs => q.window_buffer) > p_now THEN
    c.due_at := last.created_at + make_interval(secs => q.window_buffer);
    PERFORM queue_keep(c);
    RETURN;
  END IF;

  free := int8multirange(int8range(c.position + 1, head + 1)) - c.settled - c.leased;
  IF c.failing AND NOT isempty(free) THEN
    IF q.competing THEN
      free := free - coalesce((
        SELECT range_agg(int8range(a.seq, a.seq + 1)) FROM attempts a
         WHERE a.partition_id = c.partition_id AND a.group_id = c.group_id AND a.retry_at > p_now), '{}');
    ELSE
      SELECT a.seq, a.retry_at INTO hi, retry_at FROM attempts a
       WHERE a.partition_id = c.partition_id AND a.group_id = c.group_id AND a.retry_at > p_now ORDER BY a.seq LIMIT 1;
      free := free * int8multirange(int8range(NULL, hi));
    END IF;
  END IF;
  IF q.ttl > 0 AND NOT isempty(free) THEN
    c.settled := c.settled + queue_drop_stale(c, q, free, p_now);
    free := free - c.settled;
  END IF;
  SELECT array_agg(m.seq) FILTER (WHERE m.fits), count(*) FILTER (WHERE m.fits), max(m.seq) FILTER (WHERE m.fits),
         sum(m.size) FILTER (WHERE m.fits), count(*) = p_want OR NOT bool_and(m.fits)
    INTO seqs, n, hi, size, more
    FROM (SELECT m.seq, m.size, sum(m.size) OVER w <= p_max_bytes OR row_number() OVER w = 1 AS fits
            FROM (SELECT m.seq, m.size FROM unnest(free) r CROSS JOIN LATERAL (
                    SELECT m.seq, octet_length(m.payload) + coalesce(octet_length(m.headers), 0) AS size FROM messages m
                     WHERE m.partition_id = c.partition_id AND m.seq >= lower(r) AND m.seq < upper(r)
                       AND (q.delayed_processing = 0
                            OR m.created_at <= p_now - make_interval(secs => q.delayed_processing))
                     ORDER BY m.seq LIMIT p_want) m LIMIT p_want) m
          WINDOW w AS (ORDER BY m.seq)) m;

  IF n > 0 THEN
    IF hi - seqs[1] = n - 1 THEN
      taken := int8multirange(int8range(seqs[1], hi + 1));
    ELSE
      SELECT range_agg(int8range(s.seq, s.seq + 1)) INTO taken FROM unnest(seqs) s (seq);
    END IF;
    -- numbers with no message
    c.settled := c.settled + (free * int8multirange(int8range(NULL, hi + 1)) - taken);
    expires := p_now + make_interval(secs => CASE WHEN q.lease_time > 0 THEN q.lease_time ELSE 60 END);
    INSERT INTO leases
      (lease_id, partition_id, group_id, queue_id, taken_at, expires_at, taken, open)
    VALUES (p_lease, c.partition_id, c.group_id, c.queue_id, p_now, expires, taken, taken);
    c.leased := c.leased + taken;
    c.lease_id := p_lease;
    c.next_expiry := least(c.next_expiry, expires);
  END IF;

  IF NOT q.competing AND n > 0 THEN
    c.due_at := expires;
  ELSIF more THEN
    c.due_at := clock_timestamp();
  ELSE
    free := free - coalesce(taken, '{}');
    c.due_at := NULL;
    IF q.delayed_processing > 0 THEN
      SELECT least(c.next_expiry, m.created_at + make_interval(secs => q.delayed_processing)) INTO c.due_at
        FROM unnest(free) r CROSS JOIN LATERAL (
          SELECT m.created_at FROM messages m WHERE m.partition_id = c.partition_id AND m.seq >= lower(r) AND m.seq < upper(r)
           ORDER BY m.seq LIMIT 1) m LIMIT 1;
    END IF;
    c.due_at := coalesce(c.due_at, retry_at);
    IF c.due_at IS NULL THEN
      c.settled := c.settled + free;
      c.due_at := queue_rest(c.partition_id, c.group_id, head, c.failing, c.next_expiry);
    END IF;
  END IF;
  PERFORM queue_keep(c);
END $$;
