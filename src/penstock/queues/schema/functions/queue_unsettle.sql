-- queue_unsettle: let a group have settled messages again (a dead letter put back, a message retried by hand), alone:
-- its neighbours stay settled, other groups notice nothing. Answers the sequence numbers that are available again.
CREATE FUNCTION queue_unsettle(p_partition bigint, p_group int, p_seqs bigint[]) RETURNS bigint[] LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  c cursors; q queues; back int8multirange; seqs bigint[];
BEGIN
  PERFORM 1 FROM partitions p WHERE p.id = p_partition FOR NO KEY UPDATE;
  SELECT * INTO c FROM cursors x WHERE x.partition_id = p_partition AND x.group_id = p_group
   ORDER BY x.version DESC LIMIT 1 FOR UPDATE;
  IF NOT FOUND THEN RETURN '{}'; END IF;
  SELECT range_agg(int8range(m.seq, m.seq + 1)), array_agg(m.seq) INTO back, seqs FROM messages m
   WHERE m.partition_id = p_partition AND m.seq = ANY (p_seqs) AND (m.seq <= c.position OR c.settled @> m.seq);
  IF back IS NULL THEN RETURN '{}'; END IF;
  SELECT * INTO q FROM queues x WHERE x.id = c.queue_id;
  IF lower(back) <= c.position THEN
    c.settled := c.settled + int8multirange(int8range(lower(back), c.position + 1));
    c.position := lower(back) - 1;
  END IF;
  c.settled := c.settled - back;
  DELETE FROM attempts a WHERE a.partition_id = p_partition AND a.group_id = p_group AND a.seq = ANY (seqs);
  INSERT INTO tally_log (queue_id, group_id, consumed) VALUES (c.queue_id, p_group, -cardinality(seqs));
  c.due_at := queue_next(c, q);
  PERFORM queue_keep(c);
  RETURN seqs;
END $$;
