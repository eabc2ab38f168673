-- postgres_oldest: the session that holds vacuum back the most.
SELECT pid, application_name AS application, state, age(backend_xmin)::bigint AS xmin_age,
        extract(epoch FROM clock_timestamp() - xact_start)::float8 AS transaction_seconds
   FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()
  ORDER BY age(backend_xmin) DESC LIMIT 1;
