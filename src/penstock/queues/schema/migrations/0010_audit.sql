-- Who changed what and when: see penstock.monitor.audit, which also removes old entries.
CREATE TABLE audit (
  id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at     timestamptz NOT NULL,
  who    text NOT NULL,    -- the subject of the token, or the address
  action text NOT NULL,    -- queue.delete, group.seek, ...
  object text NOT NULL,    -- what it was done to
  detail jsonb NOT NULL,   -- what was asked for and how much it changed
  broker text NOT NULL     -- the process that did it
);
CREATE INDEX audit_at ON audit (at);
