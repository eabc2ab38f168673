-- latency_bucket: which bucket a latency falls into. Bucket b ends at 0.1 ms * 2^(b/8), so that the geometric middle of a
-- bucket is within 4.5 % of everything in it; 0 holds what took up to 0.1 ms, 280 what took 40 days and more.
-- penstock/latency.py reads them.
CREATE FUNCTION latency_bucket(p_latency interval) RETURNS smallint LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT least(280, ceil(8 / ln(2::float8) * ln(greatest(date_part('epoch', p_latency), 0.0001) / 0.0001)))::smallint
$$;
