-- queue_seek_position(partition, to, moment): the sequence number after which a group starts that seeks there.
CREATE FUNCTION queue_seek_position(p partitions, p_to text, p_moment timestamptz) RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
  IF p_to = 'end' THEN
    RETURN coalesce((SELECT m.seq FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq DESC LIMIT 1), p.floor);
  ELSIF p_to = 'beginning' THEN
    RETURN coalesce((SELECT m.seq - 1 FROM messages m WHERE m.partition_id = p.id ORDER BY m.seq LIMIT 1), p.floor);
  END IF;
  RETURN queue_seq_at(p.id, p_moment);
END $$;
