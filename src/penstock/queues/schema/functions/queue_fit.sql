-- queue_fit: the first of these messages (ascending) that have p_bytes of payload and headers together; at least one.
CREATE FUNCTION queue_fit(
  p_partition bigint, p_seqs bigint[], p_bytes bigint, OUT seqs bigint[], OUT size bigint
) LANGUAGE plpgsql AS $$
BEGIN
  SELECT array_agg(m.seq ORDER BY m.seq), sum(m.size) INTO seqs, size
    FROM (SELECT m.seq, m.size, sum(m.size) OVER (ORDER BY m.seq) AS upto,
                 row_number() OVER (ORDER BY m.seq) AS nth
            FROM (SELECT m.seq, octet_length(m.payload) + coalesce(octet_length(m.headers), 0) AS size
                    FROM unnest(p_seqs) s (seq)
                    JOIN messages m ON m.partition_id = p_partition AND m.seq = s.seq) m) m
   WHERE m.upto <= p_bytes OR m.nth = 1;
END $$;
