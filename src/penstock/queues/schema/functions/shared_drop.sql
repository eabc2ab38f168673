-- shared_drop: delete batches of a log that end before p_offset, oldest first, at most 1,000; how many. Objects that no row of
-- the log refers to any more are kept for p_grace seconds for those who read them. Takes no lock that an append needs.
CREATE FUNCTION shared_drop(p_log bigint, p_offset bigint, p_grace double precision) RETURNS int LANGUAGE plpgsql AS $$
DECLARE
  dropped int; objects text[];
BEGIN
  WITH gone AS (
    DELETE FROM shared_batches b
     WHERE b.log_id = p_log AND b.last_offset IN (
       SELECT o.last_offset FROM shared_batches o WHERE o.log_id = p_log AND o.last_offset < p_offset
        ORDER BY o.last_offset LIMIT 1000)
    RETURNING b.object
  )
  SELECT count(*), array_agg(DISTINCT g.object) FILTER (WHERE g.object IS NOT NULL) INTO dropped, objects FROM gone g;
  INSERT INTO shared_removals (object, due_at)
  SELECT o, clock_timestamp() + make_interval(secs => p_grace) FROM unnest(objects) o
   WHERE NOT EXISTS (SELECT 1 FROM shared_batches b WHERE b.log_id = p_log AND b.object = o);
  RETURN dropped;
END $$;
