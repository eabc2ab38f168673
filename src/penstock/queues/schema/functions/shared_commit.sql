-- shared_commit: set where a group resumes on these logs; leases that it holds there are void. Returns the logs for which that
-- was done: not those that are gone, or end before the offset. NULL: p_node is no longer the coordinator with p_epoch, so that
-- nothing was changed.
CREATE FUNCTION shared_commit(
  p_group text, p_logs bigint[], p_offsets bigint[], p_notes text[], p_node int DEFAULT NULL, p_epoch bigint DEFAULT NULL
) RETURNS bigint[] LANGUAGE plpgsql AS $$
DECLARE
  done bigint[];
BEGIN
  IF p_epoch IS NOT NULL THEN
    PERFORM 1 FROM shared_coordinators WHERE group_name = p_group AND node_id = p_node AND epoch = p_epoch FOR SHARE;
    IF NOT FOUND THEN RETURN NULL; END IF;
  END IF;
  WITH wanted AS (
    INSERT INTO shared_offsets AS o (group_name, log_id, committed, handed_out, note, changed_at)
    SELECT p_group, c.log_id, c.committed, c.committed, c.note, clock_timestamp()
      FROM unnest(p_logs, p_offsets, p_notes) c (log_id, committed, note)
      JOIN shared_logs l ON l.id = c.log_id AND c.committed BETWEEN 0 AND l.next_offset
     ORDER BY c.log_id
    ON CONFLICT (group_name, log_id) DO UPDATE SET committed = excluded.committed, handed_out = excluded.committed,
      note = excluded.note, changed_at = excluded.changed_at
    RETURNING o.log_id
  ), void AS (
    DELETE FROM shared_leases WHERE group_name = p_group AND log_id = ANY (p_logs)
  )
  SELECT coalesce(array_agg(log_id), '{}') INTO done FROM wanted;
  RETURN done;
END $$;
