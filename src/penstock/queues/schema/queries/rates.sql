-- rates: messages pushed and completed per second, over the last five minutes and all queues.
SELECT coalesce(sum(pushed), 0)::float8 / 300 AS pushed, coalesce(sum(done - dead - dropped), 0)::float8 / 300 AS completed FROM (
  SELECT pushed, done, dead, dropped FROM history WHERE minute > clock_timestamp() - interval '5 minutes'
  UNION ALL SELECT pushed, done, dead, dropped FROM tally_log) x;
