-- Settings that all brokers on this database share and that may change while they run (maintenance modes).
CREATE TABLE settings (
    name       text PRIMARY KEY,
    value      jsonb NOT NULL,
    changed_at timestamptz NOT NULL DEFAULT now()
);
