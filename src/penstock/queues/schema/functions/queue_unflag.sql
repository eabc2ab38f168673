-- queue_unflag: note of locked partitions that no message for later is left of them (see partitions.scheduled).
CREATE FUNCTION queue_unflag(p_partitions bigint[]) RETURNS void LANGUAGE sql AS $$
  UPDATE partitions p
     SET scheduled = false,
         emptied_at = CASE WHEN EXISTS (SELECT 1 FROM messages m WHERE m.partition_id = p.id) THEN NULL ELSE clock_timestamp() END
   WHERE p.id = ANY (p_partitions) AND p.scheduled
     AND NOT EXISTS (SELECT 1 FROM scheduled_messages s WHERE s.partition_id = p.id)
$$;
