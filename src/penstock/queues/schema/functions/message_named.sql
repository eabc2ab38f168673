-- message_named: the message of a partition that has this transaction id. Inlined by the planner.
CREATE FUNCTION message_named(p_partition bigint, p_transaction text) RETURNS SETOF messages LANGUAGE sql STABLE AS $$
  SELECT m.* FROM messages m WHERE m.partition_id = p_partition AND m.transaction_id = p_transaction
     AND hashtextextended(m.transaction_id, 0) = hashtextextended(p_transaction, 0) LIMIT 1
$$;
