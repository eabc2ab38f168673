-- shared_offset_at: the first offset of the first batch that has a record of this time (ms) or later; without a time, of the first
-- batch that is not in object storage. NULL: there is none. `newest` never falls from one batch to the next, and what was moved
-- comes before what was not, so that halving the range of offsets finds it in a few looks at the key.
CREATE FUNCTION shared_offset_at(p_log bigint, p_time bigint DEFAULT NULL) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
DECLARE
  low bigint; high bigint; middle bigint; b record; found bigint;
BEGIN
  SELECT base_offset INTO low FROM shared_batches WHERE log_id = p_log ORDER BY last_offset LIMIT 1;
  SELECT last_offset INTO high FROM shared_batches WHERE log_id = p_log ORDER BY last_offset DESC LIMIT 1;
  WHILE low <= high LOOP
    middle := low + (high - low) / 2;
    SELECT base_offset, last_offset, newest, object INTO b FROM shared_batches
     WHERE log_id = p_log AND last_offset >= middle ORDER BY last_offset LIMIT 1;
    IF coalesce(b.newest >= p_time, b.object IS NULL) THEN
      found := b.base_offset;
      high := middle - 1;
    ELSE
      low := b.last_offset + 1;
    END IF;
  END LOOP;
  RETURN found;
END $$;
