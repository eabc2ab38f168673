-- analytics_points: what the minutes in [p_since, p_until) of the given kinds (and name, and group) add up to, per interval of
-- so many seconds. Lag is that of the interval's end. At most p_limit rows, in the order of time, kind, name and group.
CREATE FUNCTION analytics_points(
  p_since timestamptz, p_until timestamptz, p_seconds double precision, p_kinds text[], p_name text, p_group text, p_limit int
) RETURNS TABLE (at timestamptz, kind text, name text, group_name text, pushed bigint, bytes bigint, acked bigint,
                 failed bigint, retried bigint, dead bigint, dropped bigint, lag bigint, buckets smallint[], counts bigint[])
LANGUAGE sql STABLE AS $$
  WITH chosen AS MATERIALIZED (
    SELECT to_timestamp(floor(date_part('epoch', a.minute) / p_seconds) * p_seconds) AS at, a.*
      FROM analytics a
     WHERE a.minute >= p_since AND a.minute < p_until AND a.kind = ANY (p_kinds)
       AND (p_name IS NULL OR a.name = p_name) AND (p_group IS NULL OR a.group_name = p_group)
  ), sums AS MATERIALIZED (
    SELECT c.at, c.kind, c.name, c.group_name, sum(c.pushed)::bigint AS pushed, sum(c.bytes)::bigint AS bytes,
           sum(c.acked)::bigint AS acked, sum(c.failed)::bigint AS failed, sum(c.retried)::bigint AS retried,
           sum(c.dead)::bigint AS dead, sum(c.dropped)::bigint AS dropped,
           (array_agg(c.lag ORDER BY c.minute DESC) FILTER (WHERE c.lag IS NOT NULL))[1] AS lag
      FROM chosen c GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4 LIMIT p_limit
  )
  SELECT s.*, l.buckets, l.counts FROM sums s LEFT JOIN (
    SELECT x.at, x.kind, x.name, x.group_name, array_agg(x.bucket ORDER BY x.bucket) AS buckets,
           array_agg(x.n ORDER BY x.bucket) AS counts
      FROM (SELECT c.at, c.kind, c.name, c.group_name, u.bucket, sum(u.n)::bigint AS n
              FROM chosen c, unnest(c.latency_buckets, c.latency_counts) AS u (bucket, n)
             GROUP BY 1, 2, 3, 4, 5) x GROUP BY 1, 2, 3, 4) l
      ON (l.at, l.kind, l.name, l.group_name) = (s.at, s.kind, s.name, s.group_name)
   ORDER BY s.at, s.kind, s.name, s.group_name
$$;
