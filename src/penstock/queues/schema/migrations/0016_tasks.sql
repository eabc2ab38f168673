-- Work that brokers do in the background: see penstock.monitor.tasks, which also removes old rows.
CREATE TABLE tasks (
  id         uuid PRIMARY KEY,
  kind       text NOT NULL,         -- requeue, purge
  what       text NOT NULL,         -- the dead letters it is about, in words
  which      jsonb NOT NULL,        -- the same as a filter
  who        text NOT NULL,         -- who asked for it
  total      bigint NOT NULL,       -- when it began
  exact      boolean NOT NULL,      -- false: there were at least `total`
  done       bigint NOT NULL DEFAULT 0,
  state      text NOT NULL DEFAULT 'running',
  error      text,
  started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  ended_at   timestamptz,
  broker     text NOT NULL,         -- the process that works on it
  seen_at    timestamptz NOT NULL DEFAULT clock_timestamp()  -- its last step; long ago: it is gone
);
