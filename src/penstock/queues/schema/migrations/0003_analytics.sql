-- Figures per minute: what the counters' history gains for them, and the table that `penstock pipeline run rollup` fills
-- and the broker serves at /api/v1/analytics. docs/decisions/0107 says why latencies are counted this way.

ALTER TABLE tally_log
  ADD COLUMN retried bigint NOT NULL DEFAULT 0,  -- deliveries that did not settle the message: it is delivered again
  ADD COLUMN bucket  smallint,                   -- how long the fastest of `done` took from push to ack (latency_bucket)
  ADD COLUMN counts  bigint[];                   -- how many fell into that bucket and those after it; NULL = all into it

ALTER TABLE history
  ADD COLUMN retried         bigint NOT NULL DEFAULT 0,
  ADD COLUMN dropped         bigint NOT NULL DEFAULT 0,
  ADD COLUMN level           bigint,              -- at the minute's end: messages stored (queue), of them settled (group)
  ADD COLUMN moved           bigint NOT NULL DEFAULT 0,  -- by how much the level changed within the minute
  ADD COLUMN latency_buckets smallint[],          -- buckets that are not empty, ascending
  ADD COLUMN latency_counts  bigint[];            -- how many acknowledgements fell into each

CREATE TABLE analytics (
  minute          timestamptz NOT NULL,
  kind            text NOT NULL CHECK (kind IN ('queue', 'group', 'topic')),
  name            text NOT NULL,             -- the queue or the topic
  group_name      text NOT NULL DEFAULT '',  -- of kind group: the group of the queue `name`
  pushed          bigint NOT NULL DEFAULT 0,
  bytes           bigint NOT NULL DEFAULT 0,
  acked           bigint NOT NULL DEFAULT 0,
  failed          bigint NOT NULL DEFAULT 0,
  retried         bigint NOT NULL DEFAULT 0,
  dead            bigint NOT NULL DEFAULT 0,
  dropped         bigint NOT NULL DEFAULT 0,
  lag             bigint,                    -- at the minute's end; NULL = not known
  latency_buckets smallint[],
  latency_counts  bigint[],
  PRIMARY KEY (minute, kind, name, group_name)
);

CREATE TABLE rollups (
  -- How far a scope ('queues', 'topics', 'queue:<name>', 'topic:<name>') was rolled up; the next run goes on a little before.
  scope  text PRIMARY KEY,
  upto   timestamptz NOT NULL,
  ran_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
