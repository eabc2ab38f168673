-- What exactly-once sinks have written to queues: see sink_claim.sql. The row of task -1 says that the batch is complete.
CREATE TABLE sink_tasks (
    target text NOT NULL,  -- the queue; '' when rows name their own
    app text NOT NULL,
    batch bigint NOT NULL,
    task integer NOT NULL,
    queue_id bigint,       -- of the target; NULL as long as it did not exist
    checksum text NOT NULL,
    run text NOT NULL,
    note text NOT NULL,
    claimed_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (target, app, batch, task)
);
