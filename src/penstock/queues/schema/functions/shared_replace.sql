-- shared_replace: batches of a log are in an object from now on. All or nothing: an exception when one of the rows that the
-- object was made from is not there any more (retention, another mover), or when the object counts as left behind. From due_at
-- on, the object may be deleted before its note is: this statement has ten minutes to end before that.
-- What replaces them are p_lasts ... p_positions, one row per range of the object. Takes no lock that an append needs.
CREATE FUNCTION shared_replace(
  p_log bigint, p_object text, p_old bigint[], p_old_objects text[], p_lasts bigint[], p_bases bigint[], p_records int[],
  p_newest bigint[], p_timelines int[], p_sizes int[], p_positions bigint[], p_grace double precision
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  gone int;
BEGIN
  DELETE FROM shared_removals WHERE object = p_object AND due_at > clock_timestamp() + interval '10 minutes';
  IF NOT FOUND THEN RAISE EXCEPTION 'object % is to be deleted', p_object; END IF;
  DELETE FROM shared_batches b USING unnest(p_old, p_old_objects) o (last_offset, object)
   WHERE b.log_id = p_log AND b.last_offset = o.last_offset AND b.object IS NOT DISTINCT FROM o.object;
  GET DIAGNOSTICS gone = ROW_COUNT;
  IF gone <> cardinality(p_old) THEN
    RAISE EXCEPTION '% of % batches are there', gone, cardinality(p_old);
  END IF;
  INSERT INTO shared_batches (log_id, last_offset, base_offset, records, newest, timeline, appended_at, size, object, position)
  SELECT p_log, r.last_offset, r.base, r.records, r.newest, r.timeline, clock_timestamp(), r.size, p_object, r.position
    FROM unnest(p_lasts, p_bases, p_records, p_newest, p_timelines, p_sizes, p_positions)
         r (last_offset, base, records, newest, timeline, size, position);
  INSERT INTO shared_removals (object, due_at)
  SELECT DISTINCT o, clock_timestamp() + make_interval(secs => p_grace) FROM unnest(p_old_objects) o
   WHERE o IS NOT NULL AND NOT EXISTS (SELECT 1 FROM shared_batches b WHERE b.log_id = p_log AND b.object = o);
END $$;
