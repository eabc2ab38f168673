-- When leases ended, of queues that ask for it (option recordDeliveries), for the archive's column of outcomes. A row
-- per lease and moment in which something of it was answered, written by a trigger in the transaction that did so.
-- PostgreSQL has the trigger only while a queue asks for it, and it names these queues: others pay nothing.
-- penstock.queues.upkeep removes rows that are older than a week. docs/decisions/0320.

SELECT set_config('penstock.search_path', current_setting('search_path'), true),
       set_config('search_path', current_setting('search_path') || ', pg_temp', true);

ALTER TABLE queues ADD COLUMN record_deliveries boolean NOT NULL DEFAULT false;

CREATE TABLE deliveries (
  ended_at     timestamptz NOT NULL,
  queue_id     int NOT NULL,
  partition_id bigint NOT NULL,
  group_id     int NOT NULL,
  taken_at     timestamptz NOT NULL,
  seqs         int8multirange NOT NULL   -- whose delivery ended: completed, failed, given back or expired
);
CREATE INDEX deliveries_by_time ON deliveries (ended_at);

CREATE FUNCTION record_delivery() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  INSERT INTO deliveries (ended_at, queue_id, partition_id, group_id, taken_at, seqs)
  VALUES (clock_timestamp(), OLD.queue_id, OLD.partition_id, OLD.group_id, OLD.taken_at,
          CASE TG_OP WHEN 'DELETE' THEN OLD.open ELSE OLD.open - NEW.open END);
  RETURN NULL;
END $$;

-- The triggers of `leases`, for the queues that ask now. Waits for calls under way, and new ones for it: they are short.
CREATE FUNCTION record_deliveries() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT SET lock_timeout = '10s' AS $$
DECLARE
  ids int[] := ARRAY(SELECT q.id FROM queues q WHERE q.record_deliveries AND q.deleted_at IS NULL ORDER BY q.id);
BEGIN
  DROP TRIGGER IF EXISTS leases_ended ON leases;
  DROP TRIGGER IF EXISTS leases_answered ON leases;
  IF cardinality(ids) > 0 THEN
    EXECUTE format('CREATE TRIGGER leases_ended AFTER DELETE ON leases FOR EACH ROW
      WHEN (OLD.queue_id = ANY (%L::int[]) AND NOT isempty(OLD.open)) EXECUTE FUNCTION record_delivery()', ids);
    EXECUTE format('CREATE TRIGGER leases_answered AFTER UPDATE OF open ON leases FOR EACH ROW
      WHEN (OLD.queue_id = ANY (%L::int[]) AND OLD.open <> NEW.open) EXECUTE FUNCTION record_delivery()', ids);
  END IF;
  RETURN NULL;
END $$;

CREATE TRIGGER record_deliveries_from_now AFTER INSERT ON queues FOR EACH ROW
  WHEN (NEW.record_deliveries) EXECUTE FUNCTION record_deliveries();
CREATE TRIGGER record_deliveries_or_not AFTER UPDATE OF record_deliveries ON queues FOR EACH ROW
  WHEN (OLD.record_deliveries <> NEW.record_deliveries) EXECUTE FUNCTION record_deliveries();

SELECT set_config('search_path', current_setting('penstock.search_path'), true);
