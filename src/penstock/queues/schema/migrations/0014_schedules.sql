-- What is pushed again and again, at the times a cron expression gives. Any broker makes the messages of a due time: in
-- the transaction that moves next_at past it, under the row's lock, so there is one and it is not forgotten.
CREATE TABLE schedules (
  name       text PRIMARY KEY,
  cron       text NOT NULL,
  timezone   text NOT NULL,
  queue      text NOT NULL,
  partition  text NOT NULL,
  payload    bytea NOT NULL,   -- JSON text; sealed when key_id is set
  headers    bytea,
  key_id     text,
  catch_up   text NOT NULL CHECK (catch_up IN ('none', 'one', 'all')),
  paused     boolean NOT NULL,
  created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  next_at    timestamptz,      -- the next due time; NULL = paused, or never again
  look_at    timestamptz,      -- when to try: next_at, or later after a failure
  runs       jsonb NOT NULL DEFAULT '[]'   -- the last ones, the newest first
);
CREATE INDEX schedules_look ON schedules (look_at) WHERE look_at IS NOT NULL;
