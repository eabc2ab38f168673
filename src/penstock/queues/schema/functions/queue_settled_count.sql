-- queue_settled_count(cursor): how many stored messages of the partition the group has settled.
CREATE FUNCTION queue_settled_count(c cursors) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
DECLARE
  p partitions; first bigint; n bigint;
BEGIN
  IF c.position <= 0 AND isempty(c.settled) THEN RETURN 0; END IF;
  SELECT * INTO p FROM partitions WHERE id = c.partition_id;
  SELECT m.seq INTO first FROM messages m WHERE m.partition_id = c.partition_id ORDER BY m.seq LIMIT 1;
  IF NOT FOUND THEN RETURN 0; END IF;
  IF p.holes = 0 THEN
    n := greatest(0, c.position - first + 1);
    RETURN n + coalesce((SELECT sum(upper(r) - lower(r)) FROM unnest(c.settled * int8multirange(int8range(first, NULL))) r), 0);
  END IF;
  RETURN (SELECT count(*) FROM messages m WHERE m.partition_id = c.partition_id
             AND (m.seq <= c.position OR c.settled @> m.seq));
END $$;
