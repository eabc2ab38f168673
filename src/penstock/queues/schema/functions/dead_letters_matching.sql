-- dead_letters_matching: the dead letters that a user means; what is NULL does not restrict. p_error is a part of the error.
-- The planner puts it into the query that uses it, so a page in the order of ids is cut by the index.
CREATE FUNCTION dead_letters_matching(
  p_queue text, p_group text, p_partition text, p_since timestamptz, p_until timestamptz, p_id bigint, p_error text
) RETURNS TABLE (id bigint, partition_id bigint, group_id int, seq bigint, failed_at timestamptz, error text, size int,
                 queue text, partition text, group_name text)
LANGUAGE sql STABLE AS $$
  SELECT d.id, d.partition_id, d.group_id, d.seq, d.failed_at, d.error, octet_length(d.payload), q.name, p.name, g.name
    FROM dead_letters d JOIN queues q ON q.id = d.queue_id AND q.deleted_at IS NULL
    JOIN partitions p ON p.id = d.partition_id
    LEFT JOIN groups g ON g.id = d.group_id
   WHERE (p_queue IS NULL OR q.name = p_queue) AND (p_group IS NULL OR g.name = p_group)
     AND (p_partition IS NULL OR p.name = p_partition) AND (p_since IS NULL OR d.failed_at >= p_since)
     AND (p_until IS NULL OR d.failed_at <= p_until) AND (p_id IS NULL OR d.id = p_id)
     AND (p_error IS NULL OR strpos(lower(d.error), lower(p_error)) > 0)
$$;
