-- queue_wake: partitions, which the caller has locked, got messages: make the cursors due that had nothing left there.
-- A cursor goes to rest (due_at NULL, or later) only under the partition's lock, so none is missed here.
CREATE FUNCTION queue_wake(p_partitions bigint[], p_now timestamptz) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  resting record;
BEGIN
  FOR resting IN
    SELECT c.partition_id, c.group_id, c.version,
           p_now + make_interval(secs => greatest(q.delayed_processing, q.window_buffer)) AS due_at
      FROM partitions p
      JOIN queues q ON q.id = p.queue_id
      JOIN groups g ON g.queue_id = p.queue_id
     CROSS JOIN LATERAL (SELECT * FROM cursors c WHERE c.partition_id = p.id AND c.group_id = g.id
                          ORDER BY c.version DESC LIMIT 1) c
     WHERE p.id = ANY (p_partitions)
       AND (c.due_at IS NULL OR q.competing AND c.due_at > p_now)
     ORDER BY c.partition_id, c.group_id
  LOOP
    UPDATE cursors c SET due_at = least(resting.due_at, c.due_at), version = c.version + 1
     WHERE c.partition_id = resting.partition_id AND c.group_id = resting.group_id AND c.version = resting.version;
  END LOOP;
END $$;
