-- queue_keep: write a locked cursor back. The position moves over the settled prefix, never over a gap in it.
CREATE FUNCTION queue_keep(c cursors) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  first int8range;
BEGIN
  IF c.position >= 0 AND NOT isempty(c.settled) THEN
    IF lower(c.settled) <= c.position + 1 THEN
      c.settled := c.settled + int8multirange(int8range(lower(c.settled), c.position + 1));
      SELECT r INTO first FROM unnest(c.settled) r LIMIT 1;
      c.position := upper(first) - 1;
      c.settled := c.settled - int8multirange(first);
    END IF;
  END IF;
  UPDATE cursors k SET version = c.version + 1, position = c.position, settled = c.settled, leased = c.leased,
         due_at = c.due_at, next_expiry = c.next_expiry, lease_id = c.lease_id, failing = c.failing,
         consumed = c.consumed, batches = c.batches, consumed_at = c.consumed_at, start_at = c.start_at
   WHERE k.partition_id = c.partition_id AND k.group_id = c.group_id AND k.version = c.version;
END $$;
