-- postgres_database: the server and its database: version, bytes, sessions, transactions.
SELECT current_setting('server_version') AS version, pg_database_size(current_database()) AS size,
       d.numbackends AS sessions, d.xact_commit AS commits, d.xact_rollback AS rollbacks, d.deadlocks
  FROM pg_stat_database d WHERE d.datname = current_database();
