-- Shared topics: logs that belong to no machine. PostgreSQL gives the offsets and keeps the newest batches; older ranges are
-- in object storage, and their rows keep the coordinates. functions/shared_append.sql says how an append works.

CREATE TABLE shared_logs (  -- a partition of a shared topic
  id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- never used again: an append to a deleted topic finds nothing
  topic       text NOT NULL,
  partition   int NOT NULL,
  incarnation uuid NOT NULL,           -- the same for all partitions of a topic
  policy      text NOT NULL DEFAULT 'delete',
  limits      text NOT NULL DEFAULT '{}',  -- of this topic: retention and the largest record, as JSON
  next_offset bigint NOT NULL DEFAULT 0,
  newest      bigint NOT NULL DEFAULT 0,  -- the latest timestamp of its records, milliseconds since 1970
  timeline    int NOT NULL,            -- of the server, at the last append
  changed_at  timestamptz NOT NULL,    -- the last append
  UNIQUE (topic, partition)
) WITH (fillfactor = 30, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE shared_batches (
  log_id      bigint NOT NULL,
  last_offset bigint NOT NULL,
  base_offset bigint NOT NULL,
  records     int NOT NULL,
  newest      bigint NOT NULL,         -- the latest timestamp up to here: it never falls, so that a time is found by halving
  timeline    int NOT NULL,
  appended_at timestamptz NOT NULL,
  size        int NOT NULL,
  data        bytea,                   -- Kafka's record batch, in which base offset and leader epoch are not set yet;
  object      text,                    -- or batches in object storage, in which they are
  position    bigint,
  PRIMARY KEY (log_id, last_offset)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_insert_scale_factor = 0.2,
        autovacuum_vacuum_cost_delay = 0, toast.autovacuum_vacuum_scale_factor = 0,
        toast.autovacuum_vacuum_threshold = 10000, toast.autovacuum_vacuum_cost_delay = 0);
ALTER TABLE shared_batches ALTER COLUMN data SET STORAGE EXTERNAL;  -- compressed by producers, or not worth it

CREATE TABLE shared_producers (
  log_id    bigint NOT NULL,
  producer  bytea NOT NULL,
  epoch     int NOT NULL,              -- of one of Kafka's; -1: one of ours
  expected  bigint NOT NULL,           -- the sequence of its next batch; ours: minus 2^63, so that all 64 bits fit
  sequences bigint[] NOT NULL,         -- of its last batches, oldest first, and where they went
  offsets   bigint[] NOT NULL,
  counts    int[] NOT NULL,
  seen_at   timestamptz NOT NULL,
  PRIMARY KEY (log_id, producer)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE shared_commits (          -- answers of calls, so that a call that is repeated gets the same one
  id       uuid PRIMARY KEY,
  at       timestamptz NOT NULL,
  offsets  bigint[] NOT NULL,
  statuses text[],
  ends     bigint[] NOT NULL,
  timeline int NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX shared_commits_at ON shared_commits USING brin (at);

CREATE TABLE shared_gaps (             -- offsets that were left out because a failover may have lost what had them
  log_id      bigint NOT NULL,
  gap_start   bigint NOT NULL,
  gap_end     bigint NOT NULL,
  timeline    int NOT NULL,            -- the one that ended here
  at          timestamptz NOT NULL,
  PRIMARY KEY (log_id, gap_start)
);

CREATE TABLE shared_offsets (          -- how far groups have come
  group_name text NOT NULL,
  log_id     bigint NOT NULL,
  committed  bigint NOT NULL,
  handed_out bigint NOT NULL,          -- the first offset that no lease had
  note       text NOT NULL DEFAULT '',
  changed_at timestamptz NOT NULL,
  PRIMARY KEY (group_name, log_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE shared_leases (           -- ranges that members work on (expires_at), returned ones (-infinity), and completed
  lease_id    uuid PRIMARY KEY,        -- ones that lie ahead of the committed offset (infinity)
  group_name  text NOT NULL,
  log_id      bigint NOT NULL,
  first_offset bigint NOT NULL,
  end_offset  bigint NOT NULL,
  member      text NOT NULL,
  expires_at  timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX shared_leases_of_group ON shared_leases (group_name, log_id, first_offset);

CREATE TABLE shared_coordinators (     -- which broker a group of Kafka's clients belongs to
  group_name text PRIMARY KEY,
  node_id    int NOT NULL,
  epoch      bigint NOT NULL,          -- another one with each move; a commit names it
  changed_at timestamptz NOT NULL
);

CREATE TABLE shared_removals (         -- logs whose batches are to go, and objects that readers may still use
  id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  log_id bigint,
  object text,
  due_at timestamptz NOT NULL
);

CREATE TABLE shared_nodes (            -- live brokers as Kafka's clients see them
  node_id    int PRIMARY KEY,
  member     text NOT NULL,
  host       text NOT NULL,
  port       int NOT NULL,
  seen_at    timestamptz NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE shared_mover (            -- which broker moves old ranges to object storage, and until when it may be at it
  holder text NOT NULL,
  until  timestamptz NOT NULL
);
INSERT INTO shared_mover VALUES ('', '-infinity');
