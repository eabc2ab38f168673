-- rates: messages pushed and settled per second, over the last five minutes and all queues.
SELECT coalesce(sum(pushed), 0)::float8 / 300 AS pushed, coalesce(sum(done), 0)::float8 / 300 AS done FROM (
  SELECT pushed, done FROM history WHERE minute > clock_timestamp() - interval '5 minutes'
  UNION ALL SELECT pushed, done FROM tally_log) x;
