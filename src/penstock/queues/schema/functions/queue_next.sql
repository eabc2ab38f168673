-- queue_next: return when a locked cursor is due, after acknowledgements or releases changed it.
CREATE FUNCTION queue_next(c cursors, q queues) RETURNS timestamptz LANGUAGE plpgsql AS $$
DECLARE
  head bigint; free int8multirange; retry timestamptz;
BEGIN
  IF c.position < 0 THEN RETURN c.due_at; END IF;
  IF NOT q.competing AND NOT isempty(c.leased) THEN RETURN c.next_expiry; END IF;
  SELECT m.seq INTO head FROM messages m WHERE m.partition_id = c.partition_id ORDER BY m.seq DESC LIMIT 1;
  head := greatest(head, c.position);
  free := int8multirange(int8range(c.position + 1, head + 1)) - c.settled - c.leased;
  IF isempty(free) THEN
    RETURN queue_rest(c.partition_id, c.group_id, head, c.failing, c.next_expiry);
  END IF;
  IF c.failing AND NOT q.competing THEN
    SELECT a.retry_at INTO retry FROM attempts a
     WHERE a.partition_id = c.partition_id AND a.group_id = c.group_id AND a.seq = lower(free);
  END IF;
  RETURN greatest(clock_timestamp(), retry);
END $$;
