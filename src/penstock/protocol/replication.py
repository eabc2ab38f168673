"""The query for how many seconds a standby lags behind, for brokers and Spark."""

# A standby that has replayed all that it received counts as up to date: it cannot know of more.
STANDBY_LAG = """
SELECT CASE WHEN NOT pg_is_in_recovery() THEN 0
            WHEN pg_last_wal_receive_lsn() = pg_last_wal_replay_lsn() THEN 0
            ELSE extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp())
       END::double precision"""
