-- A sink's task records how many of its rows are stored, in the transaction that stores them, and when they are all.
ALTER TABLE sink_tasks ADD COLUMN keys text NOT NULL DEFAULT '';     -- checksum of what identifies the rows; '' = `checksum`
ALTER TABLE sink_tasks ADD COLUMN rows bigint NOT NULL DEFAULT 0;    -- stored so far
ALTER TABLE sink_tasks ADD COLUMN done boolean NOT NULL DEFAULT false;
