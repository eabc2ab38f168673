-- messages_after: the first p_limit messages of a partition after a number, as the columns of `taken`. Inlined by the planner.
CREATE FUNCTION messages_after(p_partition bigint, p_after bigint, p_limit bigint) RETURNS TABLE (
  n bigint, last bigint, size bigint, seqs bigint[], transactions text[], traces uuid[], times double precision[], producers text[],
  keys text[], payloads bytea[], headers bytea[]
) LANGUAGE sql STABLE AS $$
  SELECT count(*), max(m.seq), (sum(octet_length(m.payload)) + coalesce(sum(octet_length(m.headers)), 0))::bigint,
         array_agg(m.seq), array_agg(m.transaction_id), CASE WHEN count(m.trace_id) > 0 THEN array_agg(m.trace_id) END,
         array_agg(date_part('epoch', m.created_at)), CASE WHEN count(m.producer) > 0 THEN array_agg(m.producer) END,
         CASE WHEN count(m.key_id) > 0 THEN array_agg(m.key_id) END, array_agg(m.payload),
         CASE WHEN count(m.headers) > 0 THEN array_agg(m.headers) END
    FROM (SELECT * FROM messages x WHERE x.partition_id = p_partition AND x.seq > p_after ORDER BY x.seq LIMIT p_limit) m
$$;
