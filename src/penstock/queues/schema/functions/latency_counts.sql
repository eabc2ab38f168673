-- latency_counts: how many of the messages created at p_created (ascending) and acknowledged now fall into each bucket, from
-- the fastest one's on; NULL when all fall into that one. Times never decrease along a partition, so a bucket's share is
-- found by a binary search for its edge, not by looking at every message.
CREATE FUNCTION latency_counts(p_created timestamptz[], p_now timestamptz) RETURNS bigint[]
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
  n int := cardinality(p_created); rest int := n; slower int; counts bigint[];
  bucket int := latency_bucket(p_now - p_created[n]); slowest int := latency_bucket(p_now - p_created[1]);
BEGIN
  IF n <= 1 OR bucket = slowest THEN RETURN NULL; END IF;
  WHILE bucket < slowest LOOP
    slower := width_bucket(p_now - make_interval(secs => 0.0001 * 2 ^ (bucket / 8.0::float8)), p_created);
    counts := counts || (rest - slower)::bigint;
    rest := slower;
    bucket := bucket + 1;
  END LOOP;
  RETURN counts || rest::bigint;
END $$;
