-- queue_heal: one step of a walk over all cursors, looking for those at rest (due_at NULL) beside messages that their
-- group could have. There should be none: each is a fault, and is made due. Looks at the p_step cursors after
-- (p_partition, p_group). Answers where to go on (NULL at the end, or when another broker is at it) and what was healed.
-- Never waits: what somebody else holds at this moment is looked at in the next walk. A cursor is judged under the locks
-- of its partition and of itself, so no push or pop comes between what it says and what is stored.
CREATE FUNCTION queue_heal(
  p_partition bigint, p_group int, p_step int, OUT last_partition bigint, OUT last_group int,
  OUT healed_queues text[], OUT healed_partitions text[], OUT healed_groups text[]
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  suspect record; looked int; all_ids bigint[]; all_groups int[]; ids bigint[]; group_ids int[]; c cursors; q queues;
BEGIN
  healed_queues := '{}'; healed_partitions := '{}'; healed_groups := '{}';
  IF NOT pg_try_advisory_xact_lock(queue_lock_key('queue_heal')) THEN RETURN; END IF;
  SELECT count(*), array_agg(s.partition_id ORDER BY s.partition_id, s.group_id),
         array_agg(s.group_id ORDER BY s.partition_id, s.group_id),
         array_agg(s.partition_id ORDER BY s.partition_id, s.group_id) FILTER (WHERE s.suspect),
         array_agg(s.group_id ORDER BY s.partition_id, s.group_id) FILTER (WHERE s.suspect)
    INTO looked, all_ids, all_groups, ids, group_ids
    FROM (SELECT x.partition_id, x.group_id,
                 x.due_at IS NULL AND (SELECT m.seq FROM messages m WHERE m.partition_id = x.partition_id
                                        ORDER BY m.seq DESC LIMIT 1) > x.position AS suspect
            FROM (SELECT * FROM cursors y WHERE (y.partition_id, y.group_id) > (p_partition, p_group)
                   ORDER BY y.partition_id, y.group_id LIMIT p_step) x) s;
  IF looked = p_step THEN
    last_partition := all_ids[looked];
    last_group := all_groups[looked];
  END IF;
  IF ids IS NULL THEN RETURN; END IF;
  FOR suspect IN
    SELECT u.partition_id, u.group_id, p.queue_id, p.name AS partition, g.name AS group_name
      FROM unnest(ids, group_ids) AS u (partition_id, group_id)
      JOIN partitions p ON p.id = u.partition_id JOIN groups g ON g.id = u.group_id
     ORDER BY 1, 2
  LOOP
    SELECT * INTO q FROM queues x WHERE x.id = suspect.queue_id AND x.deleted_at IS NULL;
    CONTINUE WHEN NOT FOUND;
    PERFORM 1 FROM partitions p WHERE p.id = suspect.partition_id FOR NO KEY UPDATE SKIP LOCKED;
    CONTINUE WHEN NOT FOUND;
    SELECT * INTO c FROM cursors x WHERE x.partition_id = suspect.partition_id AND x.group_id = suspect.group_id
     ORDER BY x.version DESC LIMIT 1 FOR UPDATE SKIP LOCKED;
    CONTINUE WHEN NOT FOUND OR c.due_at IS NOT NULL;
    c.due_at := CASE WHEN c.position < 0 THEN greatest(c.start_at, clock_timestamp()) ELSE queue_next(c, q) END;
    CONTINUE WHEN c.due_at IS NULL;
    PERFORM queue_keep(c);
    healed_queues := healed_queues || q.name;
    healed_partitions := healed_partitions || suspect.partition;
    healed_groups := healed_groups || suspect.group_name;
  END LOOP;
END $$;
