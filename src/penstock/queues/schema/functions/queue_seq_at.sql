-- queue_seq_at(partition, moment): the last sequence number created at or before the moment, 0 when there is none.
-- Times never decrease along a partition, so this is a binary search over the primary key.
CREATE FUNCTION queue_seq_at(p_partition bigint, p_moment timestamptz) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
  low bigint; high bigint; middle bigint; probe record;
BEGIN
  SELECT m.seq, m.created_at INTO probe FROM messages m WHERE m.partition_id = p_partition ORDER BY m.seq DESC LIMIT 1;
  IF NOT FOUND THEN
    RETURN (SELECT floor FROM partitions WHERE id = p_partition);
  END IF;
  IF probe.created_at <= p_moment THEN RETURN probe.seq; END IF;
  high := probe.seq;  -- created after the moment
  SELECT m.seq, m.created_at INTO probe FROM messages m WHERE m.partition_id = p_partition ORDER BY m.seq LIMIT 1;
  IF probe.created_at > p_moment THEN RETURN probe.seq - 1; END IF;
  low := probe.seq;   -- created at or before it
  WHILE high - low > 1 LOOP
    middle := low + (high - low) / 2;
    SELECT m.seq, m.created_at INTO probe FROM messages m
     WHERE m.partition_id = p_partition AND m.seq <= middle ORDER BY m.seq DESC LIMIT 1;
    IF probe.seq <= low THEN
      low := middle;  -- nothing stored in between
    ELSIF probe.created_at <= p_moment THEN
      low := middle;
    ELSE
      high := probe.seq;
    END IF;
  END LOOP;
  RETURN low;
END $$;
