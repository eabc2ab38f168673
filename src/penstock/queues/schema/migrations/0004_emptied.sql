-- Since when a partition may be empty: set when it is made and when its last message is deleted, cleared by the upkeep that
-- finds messages in it. So the upkeep that removes idle partitions visits each once, instead of all of them every time.
ALTER TABLE partitions ADD COLUMN emptied_at timestamptz DEFAULT clock_timestamp();
CREATE INDEX partitions_emptied ON partitions (emptied_at) WHERE emptied_at IS NOT NULL;
