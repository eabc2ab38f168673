-- bytes_between: the n-th of several byte strings that lie one after the other (see append). Inlined by the planner.
CREATE FUNCTION bytes_between(p_bytes bytea, p_bounds int[], p_n int) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$
  SELECT substring(p_bytes FROM p_bounds[p_n] FOR p_bounds[p_n + 1] - p_bounds[p_n])
$$;
