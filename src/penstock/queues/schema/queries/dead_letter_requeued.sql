-- dead_letter_requeued: note at the messages of these dead letters that they were put back, and what they had died of.
-- $1 ids of dead letters
INSERT INTO traces (queue_id, partition_id, seq, group_name, event_type, data)
SELECT d.queue_id, d.partition_id, coalesce(m.seq, d.seq), coalesce(g.name, ''), 'requeued',
       convert_to(json_build_object('error', d.error, 'attempts', d.attempts, 'failedAt', d.failed_at)::text, 'UTF8')
  FROM dead_letters d
  LEFT JOIN groups g ON g.id = d.group_id
  LEFT JOIN LATERAL message_named(d.partition_id, d.transaction_id) m ON true
 WHERE d.id = ANY ($1);
