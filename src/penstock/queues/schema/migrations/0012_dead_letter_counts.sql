-- How many dead letters exist, per queue (group 0) and group, without counting them: letters come and go by many ways
-- (given up, put back, purged, their group renumbered), so the table itself says so, to a log that queue_rollup folds.
-- A log of its own: the rollup of a release before this one would throw away a column of tally_log that it does not know.
ALTER TABLE tallies ADD COLUMN letters bigint NOT NULL DEFAULT 0;

CREATE TABLE letter_log (
  queue_id int NOT NULL,
  group_id int NOT NULL,
  letters  bigint NOT NULL   -- how many more there are; negative: fewer
) WITH (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 5000, vacuum_truncate = off);
CREATE INDEX letter_log_of_queue ON letter_log (queue_id);

CREATE FUNCTION dead_letters_counted() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
  IF TG_OP <> 'DELETE' THEN
    INSERT INTO letter_log (queue_id, group_id, letters)
    SELECT m.queue_id, coalesce(m.group_id, 0), count(*) FROM made m
     GROUP BY GROUPING SETS ((m.queue_id, m.group_id), (m.queue_id)) HAVING count(*) > 0;
  END IF;
  IF TG_OP <> 'INSERT' THEN
    INSERT INTO letter_log (queue_id, group_id, letters)
    SELECT g.queue_id, coalesce(g.group_id, 0), -count(*) FROM gone g
     GROUP BY GROUPING SETS ((g.queue_id, g.group_id), (g.queue_id)) HAVING count(*) > 0;
  END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER counted_insert AFTER INSERT ON dead_letters
  REFERENCING NEW TABLE AS made FOR EACH STATEMENT EXECUTE FUNCTION dead_letters_counted();
CREATE TRIGGER counted_delete AFTER DELETE ON dead_letters
  REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION dead_letters_counted();
CREATE TRIGGER counted_update AFTER UPDATE ON dead_letters
  REFERENCING OLD TABLE AS gone NEW TABLE AS made FOR EACH STATEMENT EXECUTE FUNCTION dead_letters_counted();
INSERT INTO letter_log (queue_id, group_id, letters)
SELECT d.queue_id, coalesce(d.group_id, 0), count(*) FROM dead_letters d
 GROUP BY GROUPING SETS ((d.queue_id, d.group_id), (d.queue_id)) HAVING count(*) > 0;
