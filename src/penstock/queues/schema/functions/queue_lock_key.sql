-- queue_lock_key(job): the advisory lock of a job that one broker at a time does, whatever its release: the functions of each
-- release have a schema of their own, so it is named after the schema of the tables.
CREATE FUNCTION queue_lock_key(p_job text) RETURNS bigint LANGUAGE sql STABLE AS $$
  SELECT hashtextextended('penstock.' || p_job || '.' || n.nspname, 0)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = 'cursors'::regclass
$$;
