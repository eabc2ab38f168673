-- Which processes serve these queues and how they are, and what upkeep deleted: both per minute, kept for a week.

CREATE TABLE members (
  -- Written every few seconds by each process, so the newest row of a member says whether it is alive.
  minute     timestamptz NOT NULL,
  member     text NOT NULL,         -- one process, from its start to its end
  hostname   text NOT NULL,
  worker     int NOT NULL,          -- 0 = the owner of the data directory
  pid        int NOT NULL,
  server     text NOT NULL,
  started_at timestamptz NOT NULL,
  seen_at    timestamptz NOT NULL,
  figures    jsonb NOT NULL,
  PRIMARY KEY (minute, member)
) WITH (fillfactor = 50, vacuum_truncate = off);

CREATE TABLE removals (
  minute   timestamptz NOT NULL,
  queue_id int NOT NULL,
  reason   text NOT NULL,           -- retention, completed, eviction or ttl
  messages bigint NOT NULL,
  steps    int NOT NULL,
  PRIMARY KEY (minute, queue_id, reason)
) WITH (fillfactor = 50, vacuum_truncate = off);
