-- queue_close_leases: the messages p_answered of a locked cursor are answered: remove the leases that
-- have no other open message, and take them out of the rest. p_leases are those the answers named;
-- with a NULL among them any lease may be meant. Answers the leases that ended.
CREATE FUNCTION queue_close_leases(c cursors, p_answered int8multirange, p_leases uuid[])
RETURNS uuid[] LANGUAGE plpgsql AS $$
DECLARE
  ended uuid[];
BEGIN
  IF array_position(p_leases, NULL) IS NULL THEN
    -- by their key: there may be thousands in a shared partition
    WITH over AS (
      DELETE FROM leases l
       WHERE l.lease_id = ANY (p_leases) AND l.partition_id = c.partition_id
         AND l.group_id = c.group_id AND l.open <@ p_answered
      RETURNING l.lease_id)
    SELECT array_agg(over.lease_id) INTO ended FROM over;
    IF NOT isempty(c.leased) THEN
      UPDATE leases l SET open = l.open - p_answered
       WHERE l.lease_id = ANY (p_leases) AND l.partition_id = c.partition_id
         AND l.group_id = c.group_id AND l.open && p_answered;
    END IF;
  ELSE
    WITH over AS (
      DELETE FROM leases l
       WHERE l.partition_id = c.partition_id AND l.group_id = c.group_id AND l.queue_id > 0
         AND (l.lease_id = ANY (p_leases) OR l.open && p_answered) AND l.open <@ p_answered
      RETURNING l.lease_id)
    SELECT array_agg(over.lease_id) INTO ended FROM over;
    IF NOT isempty(c.leased) THEN
      UPDATE leases l SET open = l.open - p_answered
       WHERE l.partition_id = c.partition_id AND l.group_id = c.group_id AND l.queue_id > 0
         AND l.open && p_answered;
    END IF;
  END IF;
  RETURN coalesce(ended, '{}');
END $$;
