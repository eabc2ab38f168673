-- leases: the leases that are live: how many, in how many partitions, messages taken and answered.
SELECT count(DISTINCT lease_id) AS active, count(*) AS partitions,
       coalesce(sum((SELECT sum(upper(r) - lower(r)) FROM unnest(taken) r)), 0)::bigint AS taken,
       coalesce(sum((SELECT sum(upper(r) - lower(r)) FROM unnest(taken - open) r)), 0)::bigint AS acked
  FROM leases WHERE expires_at > clock_timestamp();
