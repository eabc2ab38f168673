"""How old what a standby answers may be: asked by brokers and by Spark, in the same words."""

# A standby that has replayed all it received is as fresh as it can know, however long ago that was.
STANDBY_LAG = """
SELECT CASE WHEN NOT pg_is_in_recovery() THEN 0
            WHEN pg_last_wal_receive_lsn() = pg_last_wal_replay_lsn() THEN 0
            ELSE extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp())
       END::double precision"""
