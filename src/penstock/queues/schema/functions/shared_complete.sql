-- shared_complete: a leased range is processed; the committed offset after it. NULL: the lease is not held any more.
CREATE FUNCTION shared_complete(p_lease uuid) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  r shared_leases; done bigint; following bigint;
BEGIN
  SELECT * INTO r FROM shared_leases WHERE lease_id = p_lease;
  SELECT committed INTO done FROM shared_offsets WHERE group_name = r.group_name AND log_id = r.log_id FOR UPDATE;
  UPDATE shared_leases SET expires_at = 'infinity' WHERE lease_id = p_lease AND expires_at <> 'infinity';
  IF NOT FOUND THEN RETURN NULL; END IF;
  LOOP
    SELECT max(end_offset) INTO following FROM shared_leases
     WHERE group_name = r.group_name AND log_id = r.log_id AND expires_at = 'infinity' AND first_offset <= done AND end_offset > done;
    EXIT WHEN following IS NULL;
    done := following;
  END LOOP;
  DELETE FROM shared_leases
   WHERE group_name = r.group_name AND log_id = r.log_id AND expires_at = 'infinity' AND end_offset <= done;
  UPDATE shared_offsets SET committed = done, changed_at = clock_timestamp()
   WHERE group_name = r.group_name AND log_id = r.log_id;
  RETURN done;
END $$;
