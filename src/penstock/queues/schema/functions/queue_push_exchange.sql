-- queue_push_exchange: push, then pop for consumers that wait for it, in one call and one commit. Arguments are those of
-- queue_push and those that queue_exchange has for usual pops. Answers a row with what queue_push answers, then
-- queue_exchange's rows; a pop without one looks by itself. The partitions stay locked for the work of the pops too, which
-- is short beside the flush that follows.
CREATE FUNCTION queue_push_exchange(
  p_ids bigint[], p_starts int[], p_transactions text[], p_checks boolean[], p_traces uuid[], p_producers text[],
  p_keys text[], p_payloads bytea, p_payload_bounds int[], p_headers bytea, p_header_bounds int[], p_dues timestamptz[], p_delays double precision[],
  g_ids int[], g_starts int[], g_plain int, p_groups int[], p_batches int[], p_leases uuid[], p_since timestamptz[],
  p_bytes bigint
) RETURNS TABLE (
  request int, partition_id bigint, partition text, seqs bigint[], transactions text[], traces uuid[], times timestamptz[],
  producers text[], keys text[], payloads bytea[], headers bytea[], note text, wait double precision, due timestamptz,
  version bigint, done int[], left_over boolean[],
  items int[], outcomes text[], queue text, released boolean[], dead boolean[], more boolean,
  heads bigint[], answers bigint[], dues timestamptz[]
) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET max_parallel_workers_per_gather = 0
AS $$
BEGIN
  SELECT p.heads, p.answers, p.dues INTO heads, answers, dues
    FROM queue_push(p_ids, p_starts, p_transactions, p_checks, p_traces, p_producers, p_keys, p_payloads,
                    p_payload_bounds, p_headers, p_header_bounds, p_dues, p_delays) p;
  RETURN NEXT;
  IF g_plain = 1 THEN
    heads := NULL; answers := NULL; dues := NULL;
    SELECT x.* INTO request, partition_id, partition, seqs, transactions, traces, times, producers, keys, payloads, headers,
                    note, wait, due, version, done, left_over
      FROM queue_exchange_one(NULL, NULL, NULL, NULL, NULL, NULL, p_groups[1], p_batches[1], p_leases[1], p_since[1], NULL,
                              p_bytes) x;
    IF note IS NOT NULL THEN RETURN NEXT; END IF;
    RETURN;
  END IF;
  RETURN QUERY
    SELECT x.*, NULL::bigint[], NULL::bigint[], NULL::timestamptz[]
      FROM queue_exchange(NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                          g_ids, g_starts, g_plain, p_groups, NULL, p_batches, NULL, p_leases, p_since, NULL, p_bytes) x;
END $$;
