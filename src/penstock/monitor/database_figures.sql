-- How the database is: its oldest transaction and who holds it, dead rows of our tables, WAL written, commits, connections.
SELECT extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS oldest_seconds,
       a.pid AS oldest_pid, coalesce(nullif(a.application_name, ''), a.usename) AS oldest_who,
       (SELECT sum(n_dead_tup)::bigint FROM pg_stat_user_tables WHERE schemaname = ANY (current_schemas(false))) AS dead_rows,
       (pg_current_wal_lsn() - '0/0')::bigint AS wal,
       (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()) AS commits,
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS connections,
       current_setting('max_connections')::int AS max_connections
  FROM (SELECT 1) one
  LEFT JOIN LATERAL (SELECT * FROM pg_stat_activity
                      WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid() AND backend_type = 'client backend'
                      ORDER BY xact_start LIMIT 1) a ON true
