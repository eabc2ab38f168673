-- shared_last: the newest 64 of what is remembered of a producer's batches.
CREATE FUNCTION shared_last(p_all anyarray) RETURNS anyarray LANGUAGE sql IMMUTABLE AS $$
  SELECT p_all[greatest(1, cardinality(p_all) - 63):]
$$;
