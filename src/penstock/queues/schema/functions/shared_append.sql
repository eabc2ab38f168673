-- shared_append: append record batches to shared logs, all that one broker has at a time. One statement, which commits by
-- itself: a broker that is frozen in the middle holds no lock.
--
--   p_commit             names the call. p_again: it was made before, with an unknown outcome; if that one succeeded, its answer
--                        is returned. A first call that arrives behind its repetition fails on the key of shared_commits,
--                        also if its repetition appended nothing.
--   p_wait               wait for logs that others append to; otherwise they are skipped
--   p_logs, p_starts     the logs, each once and ascending, and how many batches come before the first of each
--   p_counts, p_times, p_data          records, latest timestamp (ms) and bytes of each batch
--   p_producers          16 bytes; NULL: the batch has none
--   p_epochs, p_sequences, p_nexts     of the producer's batch, and the sequence of the one after it. The batches of one producer
--                        in a call follow one another without a gap
--   p_expected           NULL, or what an unknown producer must begin with: an earlier batch of it failed
-- Returns one row of arrays, parallel to the batches:
--   offsets    the first offset of each batch
--   statuses   NULL: all were appended. Otherwise appended; duplicate (offset NULL: no longer known where it went); skipped; gone;
--              fenced (a newer epoch has appended); early, old (not the next sequence, and not a remembered one)
--   counts     records of each, where a duplicate had another number
-- and parallel to the logs:
--   ends       the offset after the last record; NULL: skipped or gone
-- and the server's timeline and time.
--
-- The rows of the logs are locked in the order of their ids, to the commit: offsets have no gaps and become visible in order.
-- A new timeline means that an asynchronous standby may have been promoted, which did not have the last appends: their
-- offsets are not given again. As many are left out as a broker can give in the time since the last append that is known.
-- The time line of the control file is an old one until the first checkpoint after a promotion; the one that WAL is inserted
-- with is right from the first write on. The standby may have missed batches of a producer, too: a producer that has not
-- appended since may continue with any later sequence.
CREATE FUNCTION shared_append(
  p_commit uuid, p_again boolean, p_wait boolean, p_logs bigint[], p_starts int[], p_counts int[], p_times bigint[], p_data bytea[],
  p_producers bytea[] DEFAULT NULL, p_epochs int[] DEFAULT NULL, p_sequences bigint[] DEFAULT NULL, p_nexts bigint[] DEFAULT NULL,
  p_expected bigint[] DEFAULT NULL,
  OUT offsets bigint[], OUT statuses text[], OUT counts int[], OUT ends bigint[], OUT timeline int, OUT at timestamptz
) LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
#variable_conflict use_column
DECLARE
  total int := cardinality(p_counts); locked bigint[]; present bigint[]; t timestamptz; line int; known boolean;
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended(p_commit::text, 0));
  t := clock_timestamp();
  line := shared_timeline();
  IF p_again THEN
    SELECT c.offsets, c.statuses, c.ends, c.timeline, c.at INTO offsets, statuses, ends, timeline, at
      FROM shared_commits c WHERE c.id = p_commit;
    IF FOUND THEN counts := p_counts; RETURN; END IF;
  END IF;
  IF p_wait THEN
    SELECT array_agg(l.id) INTO locked
      FROM (SELECT l.id FROM shared_logs l WHERE l.id = ANY (p_logs) ORDER BY l.id FOR NO KEY UPDATE) l;
  ELSE
    SELECT array_agg(l.id) INTO locked
      FROM (SELECT l.id FROM shared_logs l WHERE l.id = ANY (p_logs) ORDER BY l.id FOR NO KEY UPDATE SKIP LOCKED) l;
  END IF;
  IF cardinality(locked) = cardinality(p_logs) THEN present := locked;
  ELSE SELECT coalesce(array_agg(l.id), '{}') INTO present FROM shared_logs l WHERE l.id = ANY (p_logs); END IF;

  -- The common case: no producer has a sequence to check.
  IF p_producers IS NULL AND present = locked AND cardinality(locked) = cardinality(p_logs) THEN
    WITH log AS MATERIALIZED (
      SELECT * FROM shared_heads(p_logs, p_starts, total, line, t)
    ), item AS MATERIALIZED (
      SELECT i.*, i.head + sum(p_counts[i.n]) OVER (PARTITION BY i.id ORDER BY i.n) AS tail,
             greatest(i.newest, max(p_times[i.n]) OVER (PARTITION BY i.id ORDER BY i.n)) AS latest
        FROM (SELECT l.*, generate_series(l.start + 1, l.stop) AS n FROM log l) i
    ), stored AS (
      INSERT INTO shared_batches (log_id, last_offset, base_offset, records, newest, timeline, appended_at, size, data)
      SELECT i.id, i.tail - 1, i.tail - p_counts[i.n], p_counts[i.n], i.latest, line, t, length(p_data[i.n]), p_data[i.n] FROM item i
    ), advanced AS (
      UPDATE shared_logs l SET next_offset = i.tail, newest = i.latest, timeline = line, changed_at = t
        FROM (SELECT id, max(tail) AS tail, max(latest) AS latest FROM item GROUP BY id) i WHERE l.id = i.id
      RETURNING l.id, l.next_offset
    ), left_out AS (
      INSERT INTO shared_gaps (log_id, gap_start, gap_end, timeline, at)
      SELECT l.id, l.next_offset, l.head, l.timeline, t FROM log l WHERE l.head > l.next_offset
    ), answer AS (
      SELECT (SELECT array_agg(i.tail - p_counts[i.n] ORDER BY i.n) FROM item i) AS offsets,
             (SELECT array_agg(a.next_offset ORDER BY a.id) FROM advanced a) AS ends
    ), remembered AS (
      INSERT INTO shared_commits (id, at, offsets, ends, timeline) SELECT p_commit, t, a.offsets, a.ends, line FROM answer a
    )
    SELECT a.offsets, NULL, p_counts, a.ends, line, t INTO offsets, statuses, counts, ends, timeline, at FROM answer a;
    RETURN;
  END IF;

  WITH log AS MATERIALIZED (
    SELECT h.*, CASE WHEN h.timeline <> line THEN h.head
                     ELSE (SELECT max(p.gap_end) FROM shared_gaps p WHERE p.log_id = h.id) END AS since
      FROM shared_heads(p_logs, p_starts, total, line, t) h WHERE h.id = ANY (locked)
  ), item AS (
    SELECT g.id, i.n, l.head, l.newest, p_counts[i.n] AS count, p_producers[i.n] AS producer, p_epochs[i.n] AS epoch,
           p_sequences[i.n] AS sequence, s.epoch AS stored_epoch,
           CASE WHEN s.epoch IS NULL THEN p_expected[i.n] WHEN p_epochs[i.n] > s.epoch THEN 0
                WHEN s.offsets[cardinality(s.offsets)] < l.since AND p_epochs[i.n] = s.epoch AND CASE s.epoch
                     WHEN -1 THEN p_sequences[i.n] > s.expected
                     ELSE (p_sequences[i.n] - s.expected) & 2147483647 BETWEEN 1 AND 1073741823 END
                THEN coalesce(p_expected[i.n], p_sequences[i.n])
                ELSE s.expected END AS expected,
           CASE WHEN s.epoch = p_epochs[i.n] THEN array_position(s.sequences, p_sequences[i.n]) END AS place,
           s.offsets AS stored_offsets, s.counts AS stored_counts,
           CASE WHEN l.id IS NOT NULL THEN NULL WHEN g.id = ANY (present) THEN 'skipped' ELSE 'gone' END AS missed
      FROM (SELECT * FROM unnest(p_logs, p_starts, p_starts[2:]) g (id, start, stop)) g
     CROSS JOIN LATERAL generate_series(g.start + 1, coalesce(g.stop, total)) i (n)
      LEFT JOIN log l ON l.id = g.id
      LEFT JOIN shared_producers s ON s.log_id = l.id AND s.producer = p_producers[i.n]
  ), checked AS (
    SELECT i.*, CASE WHEN i.epoch = -1 OR i.stored_counts[i.place] = i.count THEN i.place END AS found,
           min(i.n) FILTER (WHERE i.sequence = i.expected) OVER (PARTITION BY i.id, i.producer) AS begin
      FROM item i
  ), judged AS (
    SELECT i.*, CASE WHEN i.missed IS NOT NULL THEN i.missed WHEN i.producer IS NULL THEN 'appended'
                     WHEN i.epoch < i.stored_epoch THEN 'fenced' WHEN i.found IS NOT NULL THEN 'duplicate'
                     WHEN i.expected IS NULL OR i.n >= i.begin THEN 'appended'
                     WHEN i.epoch = -1 AND i.sequence >= 0 THEN CASE WHEN i.sequence >= i.expected THEN 'appended' ELSE 'duplicate' END
                     WHEN i.epoch >= 0 OR i.sequence > i.expected THEN 'early' ELSE 'old' END AS status
      FROM checked i
  ), numbered AS MATERIALIZED (
    SELECT j.*, CASE WHEN j.status = 'appended'
                     THEN j.head - j.count + sum(j.count) FILTER (WHERE j.status = 'appended') OVER (PARTITION BY j.id ORDER BY j.n)
                     ELSE j.stored_offsets[j.found] END AS first,
           greatest(j.newest, max(p_times[j.n]) FILTER (WHERE j.status = 'appended') OVER (PARTITION BY j.id ORDER BY j.n)) AS latest
      FROM judged j
  ), stored AS (
    INSERT INTO shared_batches (log_id, last_offset, base_offset, records, newest, timeline, appended_at, size, data)
    SELECT i.id, i.first + i.count - 1, i.first, i.count, i.latest, line, t, length(p_data[i.n]), p_data[i.n]
      FROM numbered i WHERE i.status = 'appended'
  ), reached AS (
    SELECT i.id, max(i.first + i.count) AS stop, max(i.latest) AS latest FROM numbered i WHERE i.status = 'appended' GROUP BY 1
  ), advanced AS (
    UPDATE shared_logs l SET next_offset = r.stop, newest = r.latest, timeline = line, changed_at = t FROM reached r WHERE l.id = r.id
  ), left_out AS (
    INSERT INTO shared_gaps (log_id, gap_start, gap_end, timeline, at)
    SELECT l.id, l.next_offset, l.head, l.timeline, t FROM log l JOIN reached r ON r.id = l.id WHERE l.head > l.next_offset
  ), produced AS (
    INSERT INTO shared_producers AS p (log_id, producer, epoch, expected, sequences, offsets, counts, seen_at)
    SELECT i.id, i.producer, max(i.epoch), (array_agg(p_nexts[i.n] ORDER BY i.n DESC))[1],
           array_agg(i.sequence ORDER BY i.n), array_agg(i.first ORDER BY i.n), array_agg(i.count ORDER BY i.n), t
      FROM numbered i WHERE i.status = 'appended' AND i.producer IS NOT NULL GROUP BY 1, 2
    ON CONFLICT (log_id, producer) DO UPDATE SET
      epoch = excluded.epoch, expected = excluded.expected, seen_at = excluded.seen_at,
      sequences = CASE WHEN p.epoch = excluded.epoch THEN shared_last(p.sequences || excluded.sequences) ELSE excluded.sequences END,
      offsets = CASE WHEN p.epoch = excluded.epoch THEN shared_last(p.offsets || excluded.offsets) ELSE excluded.offsets END,
      counts = CASE WHEN p.epoch = excluded.epoch THEN shared_last(p.counts || excluded.counts) ELSE excluded.counts END
  ), answer AS (
    SELECT (SELECT array_agg(i.first ORDER BY i.n) FROM numbered i) AS offsets,
           (SELECT CASE WHEN bool_or(i.status <> 'appended') THEN array_agg(i.status ORDER BY i.n) END FROM numbered i) AS statuses,
           (SELECT array_agg(CASE WHEN i.status = 'duplicate' THEN coalesce(i.stored_counts[i.found], 0) ELSE i.count END ORDER BY i.n)
              FROM numbered i) AS counts,
           (SELECT array_agg(coalesce(r.stop, l.next_offset) ORDER BY g.id)
              FROM unnest(p_logs) g (id) LEFT JOIN log l ON l.id = g.id LEFT JOIN reached r ON r.id = g.id) AS ends
  ), remembered AS (
    INSERT INTO shared_commits (id, at, offsets, statuses, ends, timeline)
    SELECT p_commit, t, a.offsets, a.statuses, a.ends, line FROM answer a WHERE p_again OR EXISTS (SELECT 1 FROM reached)
  )
  SELECT a.offsets, a.statuses, a.counts, a.ends, line, t INTO offsets, statuses, counts, ends, timeline, at FROM answer a;
END $$;
