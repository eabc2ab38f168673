-- shared_lease: a range of a shared log for one member of a group; NULL when there is nothing to hand out now.
-- What another member gave back, or held for too long, comes before what no member had.
CREATE FUNCTION shared_lease(
  p_group text, p_log bigint, p_member text, p_most bigint, p_seconds double precision, p_lease uuid,
  OUT first_offset bigint, OUT end_offset bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  oldest bigint; stop bigint; base bigint; o shared_offsets; r shared_leases;
BEGIN
  SELECT l.next_offset, coalesce((SELECT b.base_offset FROM shared_batches b WHERE b.log_id = l.id ORDER BY b.last_offset LIMIT 1),
                                 l.next_offset) INTO stop, oldest FROM shared_logs l WHERE l.id = p_log;
  INSERT INTO shared_offsets (group_name, log_id, committed, handed_out, changed_at)
  SELECT p_group, p_log, oldest, oldest, clock_timestamp() WHERE oldest IS NOT NULL ON CONFLICT DO NOTHING;
  SELECT * INTO o FROM shared_offsets WHERE group_name = p_group AND log_id = p_log FOR UPDATE;
  IF NOT FOUND THEN RETURN; END IF;
  IF o.committed < oldest THEN  -- aged out
    o.committed := oldest;
    o.handed_out := greatest(o.handed_out, oldest);
    UPDATE shared_offsets SET committed = o.committed, handed_out = o.handed_out WHERE group_name = p_group AND log_id = p_log;
    DELETE FROM shared_leases WHERE group_name = p_group AND log_id = p_log AND end_offset <= oldest;
  END IF;
  SELECT * INTO r FROM shared_leases
   WHERE group_name = p_group AND log_id = p_log AND expires_at <= clock_timestamp() ORDER BY first_offset LIMIT 1;
  IF FOUND THEN
    first_offset := greatest(r.first_offset, o.committed);
    stop := r.end_offset;
  ELSE
    first_offset := o.handed_out;
  END IF;
  IF first_offset >= stop THEN
    first_offset := NULL;
    RETURN;
  END IF;
  -- Offsets without records do not count: a failover may leave out millions.
  SELECT b.base_offset INTO base FROM shared_batches b WHERE b.log_id = p_log AND b.last_offset >= first_offset
   ORDER BY b.last_offset LIMIT 1;
  SELECT greatest(base, max(g.gap_end)) INTO base FROM shared_gaps g WHERE g.log_id = p_log AND g.gap_start <= first_offset;
  end_offset := least(greatest(first_offset, base) + p_most, stop);
  IF r.lease_id IS NULL THEN
    UPDATE shared_offsets SET handed_out = end_offset WHERE group_name = p_group AND log_id = p_log;
  ELSE
    DELETE FROM shared_leases WHERE lease_id = r.lease_id;
    INSERT INTO shared_leases
    SELECT gen_random_uuid(), p_group, p_log, end_offset, r.end_offset, '', '-infinity' WHERE end_offset < r.end_offset;
  END IF;
  INSERT INTO shared_leases VALUES
    (p_lease, p_group, p_log, first_offset, end_offset, p_member, clock_timestamp() + make_interval(secs => p_seconds));
END $$;
