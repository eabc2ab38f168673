-- Groups that were deleted: their names are free at once, what they left in the partitions is removed in steps, by the
-- request that deleted them or, if that broker died, by any other.
CREATE TABLE dropped_groups (
  group_id int PRIMARY KEY,
  queue_id int NOT NULL,
  reached  bigint NOT NULL DEFAULT 0   -- partitions up to this id are done
);
