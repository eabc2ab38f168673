-- Messages for later: kept apart until they are due, then appended to their partition by queue_deliver in the transaction
-- that removes them here. Rows are inserted and deleted under the lock of their partition, and never updated.
-- How many wait is counted in the tallies, as `consumed` of group -1.
CREATE TABLE scheduled_messages (
  due_at         timestamptz NOT NULL,
  id             bigint GENERATED ALWAYS AS IDENTITY,  -- the order of the pushes among those due at the same moment
  partition_id   bigint NOT NULL,
  queue_id       int NOT NULL,
  pushed_at      timestamptz NOT NULL,
  transaction_id text NOT NULL,     -- unique per partition, also among `messages`
  trace_id       uuid,
  producer       text,
  key_id         text,
  headers        bytea,
  payload        bytea NOT NULL,
  PRIMARY KEY (due_at, id)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);
CREATE INDEX scheduled_messages_transaction ON scheduled_messages (partition_id, hashtextextended(transaction_id, 0));
CREATE INDEX scheduled_messages_of_queue ON scheduled_messages (queue_id, due_at, id);

-- Whether there may be some of the partition: a push looks for duplicates among them only then.
ALTER TABLE partitions ADD COLUMN scheduled boolean NOT NULL DEFAULT false;
