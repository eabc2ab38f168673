-- shared_timeline: the timeline that this server writes WAL with. See shared_append for why it is this function.
CREATE FUNCTION shared_timeline() RETURNS int LANGUAGE sql VOLATILE AS $$
  SELECT ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int
$$;
