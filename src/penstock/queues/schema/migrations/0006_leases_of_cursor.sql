-- A lease is looked up by its key, and by its cursor only to find expired ones. The planner, which sees an almost empty
-- table, took the cursor's index for the key too and so went through every lease of the partition that vacuum may not
-- remove yet. The condition is always true; only queries that repeat it can use this index. docs/decisions/0041.
DROP INDEX leases_of_cursor;
CREATE INDEX leases_of_cursor ON leases (partition_id, group_id, expires_at) WHERE queue_id > 0;
