-- queue_xid_at(queue, moment): the last transaction that stored a message of the queue created at or before the moment, 0
-- when there is none. Transactions and times run alike but for the length of a transaction: callers allow a minute for it.
CREATE FUNCTION queue_xid_at(p_queue int, p_moment timestamptz) RETURNS xid8 LANGUAGE plpgsql STABLE AS $$
DECLARE
  low numeric; high numeric; middle numeric; probe record;
BEGIN
  SELECT m.xid, m.created_at INTO probe FROM messages m WHERE m.queue_id = p_queue ORDER BY m.xid DESC LIMIT 1;
  IF NOT FOUND THEN RETURN '0'; END IF;
  IF probe.created_at <= p_moment THEN RETURN probe.xid; END IF;
  high := probe.xid::text::numeric;  -- stored after the moment
  SELECT m.xid, m.created_at INTO probe FROM messages m WHERE m.queue_id = p_queue ORDER BY m.xid LIMIT 1;
  IF probe.created_at > p_moment THEN RETURN '0'; END IF;
  low := probe.xid::text::numeric;   -- stored at or before it
  WHILE high - low > 1 LOOP
    middle := floor((low + high) / 2);
    SELECT m.xid::text::numeric AS xid, m.created_at INTO probe FROM messages m
     WHERE m.queue_id = p_queue AND m.xid <= middle::text::xid8 ORDER BY m.xid DESC LIMIT 1;
    IF probe.xid <= low OR probe.created_at <= p_moment THEN low := middle; ELSE high := probe.xid; END IF;
  END LOOP;
  RETURN low::text::xid8;
END $$;
