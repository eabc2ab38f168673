-- queue_cursors: create the missing cursors of a group in the given partitions, starting after p_start (NULL = at the
-- first stored message). Partitions being pushed to or trimmed at this moment are marked due, and a start within them is
-- left for the first claim to find; the others are due only if they have something. While messages are being deleted any
-- start is left for that: queue_remove cannot see the new cursor, and would not count what the group settles of them.
-- The caller makes sure that nobody else creates cursors of this group in these partitions meanwhile.
CREATE FUNCTION queue_cursors(g groups, p_partitions bigint[], p_start timestamptz) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
  made int; t timestamptz; quiet bigint[]; deleting boolean := false;
BEGIN
  -- None of them: an empty array. NULL would make "not quiet" unknown, and a cursor rest beside messages for good.
  SELECT coalesce(array_agg(s.id), '{}') INTO quiet FROM (
    SELECT p.id FROM partitions p WHERE p.id = ANY (p_partitions) ORDER BY p.id FOR NO KEY UPDATE SKIP LOCKED) s;
  IF p_start IS NULL AND cardinality(quiet) < cardinality(p_partitions) THEN
    deleting := NOT pg_try_advisory_xact_lock_shared(queue_lock_key('queue_remove.' || g.queue_id));
  END IF;
  t := clock_timestamp();
  WITH start AS MATERIALIZED (
    SELECT p.id, last.seq AS head, p.id = ANY (quiet) AS still,
           CASE WHEN p_start IS NULL AND (p.id = ANY (quiet) OR NOT deleting) THEN coalesce(first.seq - 1, p.floor)
                WHEN p_start > t OR p.id <> ALL (quiet) THEN -1
                WHEN last.created_at <= p_start THEN last.seq
                ELSE queue_seq_at(p.id, p_start) END AS position,
           coalesce(first.seq, 1) AS first, p.holes, p.floor
      FROM partitions p
      LEFT JOIN LATERAL (SELECT m.seq, m.created_at FROM messages m WHERE m.partition_id = p.id
                          ORDER BY m.seq DESC LIMIT 1) last ON true
      LEFT JOIN LATERAL (SELECT m.seq FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq LIMIT 1) first ON true
     WHERE p.id = ANY (p_partitions)
       AND NOT EXISTS (SELECT 1 FROM cursors c WHERE c.partition_id = p.id AND c.group_id = g.id)
  ), made_now AS (
    INSERT INTO cursors (partition_id, group_id, queue_id, position, start_at, due_at)
    SELECT s.id, g.id, g.queue_id, s.position, CASE WHEN s.position < 0 THEN coalesce(p_start, '-infinity') ELSE p_start END,
           CASE WHEN s.position < 0 THEN greatest(p_start, t) WHEN NOT s.still OR s.head > s.position THEN t END
      FROM start s ORDER BY s.id
    RETURNING 1
  ), counted AS (
    INSERT INTO tally_log (queue_id, group_id, consumed)
    SELECT g.queue_id, g.id, skipped FROM (
      SELECT sum(CASE WHEN s.holes = 0 THEN s.position - s.first + 1
                      ELSE (SELECT count(*) FROM messages m WHERE m.partition_id = s.id AND m.seq <= s.position) END) AS skipped
        FROM start s WHERE s.head IS NOT NULL AND s.position >= s.first) x
     WHERE skipped > 0
  )
  SELECT count(*) INTO made FROM made_now;
  RETURN made;
END $$;
