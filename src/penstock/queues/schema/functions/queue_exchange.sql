-- queue_exchange: acknowledge, then pop, in one call and one commit. Arguments are those of queue_ack (a_) and of
-- queue_pop (p_). Answers queue_ack's rows (items is not NULL), then queue_pop's.
-- Acknowledging waits for cursors in the order that all follow; popping, which comes after, waits for none.
CREATE FUNCTION queue_exchange(
  a_starts int[], a_partitions bigint[], a_groups text[], a_leases uuid[], a_statuses text[], a_errors text[],
  a_transactions text[], p_groups int[], p_partitions bigint[], p_batches int[], p_spans int[], p_leases uuid[],
  p_since timestamptz[], p_back timestamptz[], p_bytes bigint
) RETURNS TABLE (
  request int, partition_id bigint, partition text, seqs bigint[], transactions text[], traces uuid[], times timestamptz[],
  producers text[], keys text[], payloads bytea[], headers bytea[], note text, wait double precision, due timestamptz,
  items int[], outcomes text[], queue text, released boolean[], dead boolean[], more boolean
) LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
BEGIN
  FOR items, outcomes, queue, partition, released, dead, more IN
    SELECT * FROM queue_ack(a_starts, a_partitions, a_groups, a_leases, a_statuses, a_errors, a_transactions)
  LOOP
    RETURN NEXT;
  END LOOP;
  RETURN QUERY
    SELECT p.*, NULL::int[], NULL::text[], NULL::text, NULL::boolean[], NULL::boolean[], NULL::boolean
      FROM queue_pop(p_groups, p_partitions, p_batches, p_spans, p_leases, p_since, p_back, p_bytes) p;
END $$;
