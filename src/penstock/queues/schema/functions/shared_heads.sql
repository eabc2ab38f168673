-- shared_heads: what an append needs to know of its logs, whose rows are locked; see shared_append.
--   head  the next offset; after a change of the timeline more than any broker can have given on the old one
CREATE FUNCTION shared_heads(
  p_logs bigint[], p_starts int[], p_total int, p_timeline int, p_at timestamptz,
  OUT id bigint, OUT start int, OUT stop int, OUT next_offset bigint, OUT head bigint, OUT newest bigint, OUT timeline int
) RETURNS SETOF record LANGUAGE sql STABLE AS $$
  SELECT g.id, g.start, coalesce(g.stop, p_total), l.next_offset,
         CASE WHEN l.timeline = p_timeline THEN l.next_offset
              ELSE l.next_offset + 1048576 * (1 + ceil(greatest(0, extract(epoch FROM p_at - l.changed_at)))::bigint) END,
         l.newest, l.timeline
    FROM unnest(p_logs, p_starts, p_starts[2:]) g (id, start, stop) JOIN shared_logs l ON l.id = g.id
$$;
