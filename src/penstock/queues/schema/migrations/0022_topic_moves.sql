-- A local topic that is being moved: its records are copied into logs that no broker sees yet.
ALTER TABLE shared_logs ADD COLUMN moving boolean NOT NULL DEFAULT false;
