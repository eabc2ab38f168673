-- Streams: queries that keep state beside the partitions they consume (functions/stream_cycle.sql). A row of stream_state
-- changes only in the transaction that acknowledges the messages it was computed from. Both tables are read with psql, too.
CREATE TABLE stream_queries (
  id           uuid NOT NULL DEFAULT gen_random_uuid() PRIMARY KEY,
  name         text NOT NULL UNIQUE,
  source_queue text NOT NULL,
  sink_queue   text,
  config_hash  text NOT NULL,   -- of the program that computes the state; another program must not continue with it
  created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
  updated_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE stream_state (
  partition_id bigint NOT NULL,  -- of the source; a partition that has state is not removed while it is idle
  query_id     uuid NOT NULL,
  key          text NOT NULL,
  value        jsonb NOT NULL,
  updated_at   timestamptz NOT NULL,
  PRIMARY KEY (partition_id, query_id, key)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);
CREATE INDEX stream_state_of_query ON stream_state (query_id);

-- A cycle acknowledged a part of the lease and left it with the rest: its expiry is not a failed attempt.
ALTER TABLE leases ADD COLUMN kept boolean NOT NULL DEFAULT false;
