-- shared_read: returns batches of a shared log from p_offset on, until they reach p_bytes or p_rows, at least one if there
-- is one, with the log's bounds, in one snapshot. One row without a batch if none follows; no row if the log was deleted.
CREATE FUNCTION shared_read(
  p_log bigint, p_offset bigint, p_bytes bigint, p_rows int DEFAULT 256,
  OUT next_offset bigint, OUT first_offset bigint, OUT base_offset bigint, OUT last_offset bigint, OUT records int,
  OUT timeline int, OUT data bytea, OUT object text, OUT "position" bigint, OUT size int
) RETURNS SETOF record LANGUAGE sql STABLE AS $$
  SELECT l.next_offset,
         coalesce((SELECT b.base_offset FROM shared_batches b WHERE b.log_id = p_log ORDER BY b.last_offset LIMIT 1), l.next_offset),
         b.base_offset, b.last_offset, b.records, b.timeline, b.data, b.object, b.position, b.size
    FROM shared_logs l
    LEFT JOIN (
      SELECT b.*, sum(b.size) OVER (ORDER BY b.last_offset) - b.size AS before
        FROM (SELECT * FROM shared_batches b WHERE b.log_id = p_log AND b.last_offset >= p_offset
               ORDER BY b.last_offset LIMIT p_rows) b) b ON b.before < p_bytes
   WHERE l.id = p_log ORDER BY b.last_offset
$$;
