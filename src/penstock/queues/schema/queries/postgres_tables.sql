-- postgres_tables: our tables: rows, dead rows, bytes.
SELECT relname AS table, n_live_tup AS live, n_dead_tup AS dead, last_autovacuum,
       pg_total_relation_size(relid) AS bytes
  FROM pg_stat_user_tables WHERE schemaname = (SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = 'messages'::regclass) ORDER BY relname;
