-- Queues: a partition is a log that is only appended to; what changes is one cursor row per (partition, group) and one
-- row per live lease. docs/queues.md explains the schema, docs/decisions/0040 to 0045 why it looks like this.
--
-- Lock order, for everything in queues/sql: partitions (by id), then queues (by id), then cursors (by partition, group).
-- Whoever holds a cursor may only try a partition (SKIP LOCKED), never wait for it.

CREATE TABLE installation (
  -- Part of every id we make, so that ids of two databases differ.
  id bigint NOT NULL CHECK (id BETWEEN 0 AND 4294967295)
);
INSERT INTO installation SELECT ('x' || substr(md5(gen_random_uuid()::text), 1, 8))::bit(32)::bigint;

CREATE TABLE queues (
  id                          int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  uuid                        uuid NOT NULL DEFAULT gen_random_uuid(),
  name                        text NOT NULL,
  namespace                   text NOT NULL DEFAULT '',
  task                        text NOT NULL DEFAULT '',
  created_at                  timestamptz NOT NULL DEFAULT clock_timestamp(),
  deleted_at                  timestamptz,             -- set: the queue is gone, its messages are being purged
  competing                   boolean NOT NULL DEFAULT false,  -- ordering: none
  lease_time                  int NOT NULL DEFAULT 300,        -- seconds
  retry_limit                 int NOT NULL DEFAULT 3,
  retry_delay                 int NOT NULL DEFAULT 1000,       -- milliseconds
  delayed_processing          int NOT NULL DEFAULT 0,          -- seconds
  window_buffer               int NOT NULL DEFAULT 0,          -- seconds
  max_size                    bigint NOT NULL DEFAULT 0,
  ttl                         int NOT NULL DEFAULT 0,          -- seconds
  priority                    int NOT NULL DEFAULT 0,
  dead_letter_queue           boolean NOT NULL DEFAULT true,
  dlq_after_max_retries       boolean NOT NULL DEFAULT true,
  retention_enabled           boolean NOT NULL DEFAULT false,
  retention_seconds           int NOT NULL DEFAULT 0,
  completed_retention_seconds int NOT NULL DEFAULT 0,
  max_wait_time_seconds       int NOT NULL DEFAULT 0,
  encryption_enabled          boolean NOT NULL DEFAULT false
);
CREATE UNIQUE INDEX queues_name ON queues (name) WHERE deleted_at IS NULL;

CREATE TABLE partitions (
  -- A push locks this row and updates nothing in it: the last message of the log says what comes next.
  id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  queue_id   int NOT NULL REFERENCES queues (id),
  name       text NOT NULL,
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  floor      bigint NOT NULL DEFAULT 0,  -- the last sequence number known to be used when messages were deleted
  holes      bigint NOT NULL DEFAULT 0,  -- messages deleted from the middle; 0 = counts follow from sequence numbers
  UNIQUE (queue_id, name)
);
CREATE INDEX partitions_of_queue ON partitions (queue_id, id);

CREATE TABLE messages (
  partition_id   bigint NOT NULL,
  seq            bigint NOT NULL,   -- 1, 2, 3 ... per partition, assigned under the partition's lock
  created_at     timestamptz NOT NULL,  -- never decreases along seq
  xid            xid8 NOT NULL DEFAULT pg_current_xact_id(),  -- the transaction that inserted it
  queue_id       int NOT NULL,
  transaction_id text NOT NULL,     -- unique per partition, checked under the partition's lock
  trace_id       uuid,
  producer       text,
  key_id         text,              -- the key that encrypted the payload; NULL = clear
  payload        bytea NOT NULL,    -- the JSON text as it came
  PRIMARY KEY (partition_id, seq)
) WITH (autovacuum_vacuum_insert_scale_factor = 0.1, autovacuum_analyze_scale_factor = 0.2, vacuum_truncate = off);
CREATE INDEX messages_transaction ON messages (partition_id, hashtextextended(transaction_id, 0));
CREATE INDEX messages_xid ON messages (queue_id, xid);

CREATE TABLE groups (
  id            int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  queue_id      int NOT NULL REFERENCES queues (id),
  name          text NOT NULL,
  created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
  mode          text,           -- all, new or timestamp; NULL until a wildcard pop decided for the whole queue
  start_at      timestamptz,    -- messages up to this moment are not for the group
  discovered    bigint NOT NULL DEFAULT 0,  -- partitions up to this id have a cursor
  discover_to   bigint NOT NULL DEFAULT 0,  -- partitions above it got one when they were created
  UNIQUE (queue_id, name)
);

CREATE TABLE cursors (
  partition_id bigint NOT NULL,
  group_id     int NOT NULL,
  queue_id     int NOT NULL,
  version      bigint NOT NULL DEFAULT 0,  -- grows with each update, so that the live row is always the last of its key
  position     bigint NOT NULL DEFAULT 0,  -- everything up to here is settled; -1 = to be found from start_at
  settled      int8multirange NOT NULL DEFAULT '{}',  -- settled beyond the position
  leased       int8multirange NOT NULL DEFAULT '{}',  -- the open messages of all leases
  due_at       timestamptz,    -- when a pop should look here; NULL = nothing for the group
  next_expiry  timestamptz,    -- no lease expires before this; NULL = no lease
  lease_id     uuid,           -- the last lease taken
  start_at     timestamptz,    -- see position
  failing      boolean NOT NULL DEFAULT false,  -- there may be rows in attempts
  consumed     bigint NOT NULL DEFAULT 0,
  batches      bigint NOT NULL DEFAULT 0,
  consumed_at  timestamptz
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off);
CREATE UNIQUE INDEX cursors_key ON cursors (partition_id, group_id, version);
CREATE INDEX cursors_due ON cursors (group_id, due_at) WHERE due_at IS NOT NULL;

CREATE TABLE leases (
  lease_id     uuid NOT NULL,
  partition_id bigint NOT NULL,
  group_id     int NOT NULL,
  queue_id     int NOT NULL,
  taken_at     timestamptz NOT NULL,
  expires_at   timestamptz NOT NULL,
  taken        int8multirange NOT NULL,
  open         int8multirange NOT NULL,  -- not answered yet; the row goes when this is empty
  PRIMARY KEY (lease_id, partition_id, group_id)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0, vacuum_truncate = off);
CREATE INDEX leases_of_cursor ON leases (partition_id, group_id, expires_at);

CREATE TABLE attempts (
  -- Only messages that failed or whose lease expired, until they are settled.
  partition_id bigint NOT NULL,
  group_id     int NOT NULL,
  seq          bigint NOT NULL,
  attempts     int NOT NULL,
  retry_at     timestamptz NOT NULL,
  error        text,
  PRIMARY KEY (partition_id, group_id, seq)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000, vacuum_truncate = off);

CREATE TABLE dead_letters (
  id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  queue_id       int NOT NULL,
  partition_id   bigint NOT NULL,
  group_id       int NOT NULL,
  seq            bigint NOT NULL,
  failed_at      timestamptz NOT NULL,
  attempts       int NOT NULL,
  error          text NOT NULL,
  created_at     timestamptz NOT NULL,
  transaction_id text NOT NULL,
  trace_id       uuid,
  producer       text,
  key_id         text,
  payload        bytea NOT NULL
) WITH (vacuum_truncate = off);
CREATE INDEX dead_letters_of_queue ON dead_letters (queue_id, id);
CREATE INDEX dead_letters_of_message ON dead_letters (partition_id, seq);

CREATE TABLE traces (
  id           uuid NOT NULL DEFAULT gen_random_uuid() PRIMARY KEY,
  queue_id     int NOT NULL,
  partition_id bigint NOT NULL,
  seq          bigint NOT NULL,
  at           timestamptz NOT NULL DEFAULT clock_timestamp(),
  group_name   text NOT NULL,
  event_type   text NOT NULL,
  worker       text,
  data         bytea NOT NULL
);
CREATE INDEX traces_of_message ON traces (partition_id, seq, at);
CREATE INDEX traces_of_queue ON traces (queue_id);

CREATE TABLE trace_names (
  name     text NOT NULL,
  at       timestamptz NOT NULL,
  trace_id uuid NOT NULL REFERENCES traces (id) ON DELETE CASCADE,
  PRIMARY KEY (name, at, trace_id)
);
CREATE INDEX trace_names_of_trace ON trace_names (trace_id);

CREATE TABLE tally_log (
  -- What each call changed, one row per queue (group_id 0) and per group; appended, rolled up every few seconds.
  queue_id int NOT NULL,
  group_id int NOT NULL,
  at       timestamptz NOT NULL DEFAULT clock_timestamp(),
  pushed   bigint NOT NULL DEFAULT 0,
  removed  bigint NOT NULL DEFAULT 0,   -- messages that are no longer stored
  consumed bigint NOT NULL DEFAULT 0,   -- messages settled by the group (minus those of them removed since)
  done     bigint NOT NULL DEFAULT 0,   -- messages settled by the group, ever
  failed   bigint NOT NULL DEFAULT 0,
  dead     bigint NOT NULL DEFAULT 0,
  dropped  bigint NOT NULL DEFAULT 0    -- exhausted without a dead-letter queue, or too old (ttl)
) WITH (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 5000, vacuum_truncate = off);
CREATE INDEX tally_log_of_queue ON tally_log (queue_id);

CREATE TABLE tallies (
  queue_id int NOT NULL,
  group_id int NOT NULL,
  pushed   bigint NOT NULL DEFAULT 0,
  removed  bigint NOT NULL DEFAULT 0,
  consumed bigint NOT NULL DEFAULT 0,
  done     bigint NOT NULL DEFAULT 0,
  failed   bigint NOT NULL DEFAULT 0,
  dead     bigint NOT NULL DEFAULT 0,
  dropped  bigint NOT NULL DEFAULT 0,
  PRIMARY KEY (queue_id, group_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 500, vacuum_truncate = off);

CREATE TABLE history (
  -- Per minute, for the time series of status pages; kept for a week.
  minute   timestamptz NOT NULL,
  queue_id int NOT NULL,
  group_id int NOT NULL,
  pushed   bigint NOT NULL DEFAULT 0,
  done     bigint NOT NULL DEFAULT 0,
  failed   bigint NOT NULL DEFAULT 0,
  dead     bigint NOT NULL DEFAULT 0,
  PRIMARY KEY (minute, queue_id, group_id)
) WITH (fillfactor = 50, vacuum_truncate = off);
