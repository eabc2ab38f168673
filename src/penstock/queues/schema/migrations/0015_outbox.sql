-- What applications call inside transactions of their own (docs/outbox.md). Names, parameters and meaning hold for every
-- release, so they are here and not beside the functions of one: each finds the newest release that has functions for it,
-- and lets those do the work. They act with the rights of their owner, so a role that may EXECUTE them needs no others.

SELECT set_config('penstock.search_path', current_setting('search_path'), true),
       set_config('search_path', current_setting('search_path') || ', pg_temp', true);

CREATE UNLOGGED TABLE outbox (
  -- What a transaction has asked for and its commit will do. No row outlives the transaction that wrote it.
  xid            xid8 NOT NULL,   -- of the transaction
  id             bigint GENERATED ALWAYS AS IDENTITY,
  first          boolean NOT NULL,   -- its trigger does all that the transaction asked for
  transaction_id text NOT NULL,
  -- a message to push
  queue          text,            -- NULL = an acknowledgement
  partition      text,
  checked        boolean,         -- the transaction id came from outside and may be stored already
  trace_id       uuid,
  headers        bytea,
  deliver_at     timestamptz,
  delay          double precision,   -- seconds
  payload        bytea,
  -- an acknowledgement
  partition_id   bigint,
  group_name     text,
  lease_id       uuid,
  status         text,
  error          text,
  PRIMARY KEY (xid, id)
) WITH (vacuum_truncate = off);

-- outbox_release: have the functions of the newest release that knows the outbox found first; for functions that
-- set the search_path themselves, and so end this with their call.
CREATE FUNCTION outbox_release() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM set_config('search_path', format('%I, %s', name, current_setting('search_path')), true) FROM (
    SELECT f.name FROM function_schemas f WHERE to_regproc(format('%I.outbox_apply', f.name)) IS NOT NULL
     ORDER BY f.made_at DESC LIMIT 1) newest;
END $$;

-- outbox_push: push a message when this transaction commits. Answers its transaction id, which is made if none is given.
CREATE FUNCTION outbox_push(
  queue text, payload json, partition text DEFAULT 'Default', transaction_id text DEFAULT NULL, headers jsonb DEFAULT NULL,
  delay double precision DEFAULT NULL, deliver_at timestamptz DEFAULT NULL, trace_id uuid DEFAULT NULL
) RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
  PERFORM outbox_release();
  RETURN (outbox_stage(queue, ARRAY[payload], partition, transaction_id, headers, delay, deliver_at, trace_id))[1];
END $$;

-- outbox_push_many: the same for each element of a JSON array. Answers the transaction ids in their order.
CREATE FUNCTION outbox_push_many(queue text, payloads json, partition text DEFAULT 'Default', headers jsonb DEFAULT NULL)
RETURNS text[] LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
  PERFORM outbox_release();
  RETURN outbox_stage(queue, ARRAY(SELECT e.value FROM json_array_elements(payloads) WITH ORDINALITY e ORDER BY e.ordinality),
                      partition, NULL, headers, NULL, NULL, NULL);
END $$;

-- outbox_ack: answer a message when this transaction commits: completed, failed, retry or dlq. The commit fails when the
-- lease is lost by then, so that what the transaction did for the message is done once.
CREATE FUNCTION outbox_ack(
  partition_id uuid, transaction_id text, lease_id uuid, consumer_group text DEFAULT '__QUEUE_MODE__',
  status text DEFAULT 'completed', error text DEFAULT NULL
) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
  PERFORM outbox_release();
  PERFORM outbox_stage_ack(partition_id, transaction_id, lease_id, consumer_group, status, error);
END $$;

CREATE FUNCTION outbox_commit() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
  PERFORM outbox_release();
  PERFORM outbox_apply();
  RETURN NULL;
END $$;

CREATE CONSTRAINT TRIGGER outbox_commit AFTER INSERT ON outbox DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN (NEW.first) EXECUTE FUNCTION outbox_commit();
ALTER TABLE outbox ENABLE ALWAYS TRIGGER outbox_commit;

REVOKE ALL ON FUNCTION outbox_release(), outbox_push, outbox_push_many, outbox_ack, outbox_commit() FROM PUBLIC;

SELECT set_config('search_path', current_setting('penstock.search_path'), true);
