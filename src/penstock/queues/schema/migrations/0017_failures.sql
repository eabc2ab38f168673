-- Who answered that a message failed, and when: see penstock.queues.failures, which also removes old rows.
CREATE TABLE failures (
  id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at           timestamptz NOT NULL,
  partition_id bigint NOT NULL,
  seq          bigint NOT NULL,
  group_name   text NOT NULL,
  worker       text NOT NULL,   -- the consumer's name, the subject of its token, or its address
  error        text NOT NULL
);
CREATE INDEX failures_of_message ON failures (partition_id, seq);
