-- shared_node: say that a broker is there, and under which address Kafka's clients reach it. Returns all that live, p_member's
-- own first. A broker keeps its number while its address is the same.
CREATE FUNCTION shared_node(
  p_member text, p_host text, p_port int, p_alive double precision, OUT node_id int, OUT host text, OUT port int, OUT own boolean
) RETURNS SETOF record LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE shared_nodes n SET member = p_member, seen_at = clock_timestamp() WHERE n.host = p_host AND n.port = p_port;
  IF NOT FOUND THEN
    PERFORM pg_advisory_xact_lock(hashtextextended('shared_nodes', 0));
    DELETE FROM shared_nodes n WHERE n.seen_at < clock_timestamp() - interval '1 day';
    INSERT INTO shared_nodes (node_id, member, host, port, seen_at)
    SELECT coalesce(max(n.node_id), 0) + 1, p_member, p_host, p_port, clock_timestamp() FROM shared_nodes n;
  END IF;
  RETURN QUERY
  SELECT n.node_id, n.host, n.port, n.member = p_member FROM shared_nodes n
   WHERE n.seen_at > clock_timestamp() - make_interval(secs => p_alive) ORDER BY n.member = p_member DESC, n.node_id;
END $$;
