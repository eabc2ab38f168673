-- queue_start: find the position of a locked cursor whose group starts at a moment that has come.
-- What is skipped is counted, so nobody may be deleting it: only with the partition's lock, which
-- is tried for. Answers the cursor; its position is still negative when the lock was not to be had.
CREATE FUNCTION queue_start(c cursors) RETURNS cursors LANGUAGE plpgsql AS $$
DECLARE
  skipped bigint;
BEGIN
  PERFORM 1 FROM partitions WHERE id = c.partition_id FOR NO KEY UPDATE SKIP LOCKED;
  IF NOT FOUND THEN RETURN c; END IF;
  c.position := queue_seq_at(c.partition_id, c.start_at);
  SELECT count(*) INTO skipped FROM messages m
   WHERE m.partition_id = c.partition_id AND m.seq <= c.position;
  IF skipped > 0 THEN
    INSERT INTO tally_log (queue_id, group_id, consumed) VALUES (c.queue_id, c.group_id, skipped);
  END IF;
  RETURN c;
END $$;
