-- shared_coordinate: which broker coordinates a group of Kafka's clients, and its epoch: the one of the row while it lives,
-- otherwise p_node from now on.
CREATE FUNCTION shared_coordinate(p_group text, p_node int, p_alive int[], OUT node_id int, OUT epoch bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  SELECT c.node_id, c.epoch INTO node_id, epoch FROM shared_coordinators c WHERE c.group_name = p_group;
  IF FOUND AND node_id = ANY (p_alive) THEN RETURN; END IF;
  INSERT INTO shared_coordinators AS c (group_name, node_id, epoch, changed_at) VALUES (p_group, p_node, 1, clock_timestamp())
  ON CONFLICT (group_name) DO UPDATE SET node_id = excluded.node_id, epoch = c.epoch + 1, changed_at = excluded.changed_at
    WHERE NOT c.node_id = ANY (p_alive);
  SELECT c.node_id, c.epoch INTO node_id, epoch FROM shared_coordinators c WHERE c.group_name = p_group;
END $$;
