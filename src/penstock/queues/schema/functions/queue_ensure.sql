-- queue_ensure: the ids of partitions by (queue name, partition name), creating what is missing. Namespace and task of a
-- new queue come from its name (a.b...). New partitions get cursors of the groups that have decided for the whole queue.
-- The arrays hold no pair twice. A new queue that is named in p_unordered lets consumers share partitions (ordering: none).
CREATE FUNCTION queue_ensure(p_queues text[], p_partitions text[], p_unordered text[] DEFAULT '{}')
RETURNS TABLE (ord bigint, queue_id int, partition_id bigint) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET max_parallel_workers_per_gather = 0
AS $$
DECLARE
  made bigint[];
BEGIN
  INSERT INTO queues (name, namespace, task, competing)
  SELECT n, split_part(n, '.', 1), split_part(n, '.', 2), n = ANY (p_unordered)
    FROM (SELECT DISTINCT n FROM unnest(p_queues) n) d
   WHERE NOT EXISTS (SELECT 1 FROM queues q WHERE q.name = d.n AND q.deleted_at IS NULL) ORDER BY n
  ON CONFLICT (name) WHERE deleted_at IS NULL DO NOTHING;
  -- Held until the end: a group that decides for the whole queue waits for us, or we see it (see queue_subscribe).
  PERFORM 1 FROM queues q WHERE q.name = ANY (p_queues) AND q.deleted_at IS NULL ORDER BY q.id FOR KEY SHARE;
  WITH new AS (
    INSERT INTO partitions AS p (queue_id, name)
    SELECT q.id, u.partition
      FROM unnest(p_queues, p_partitions) AS u (queue, partition)
      JOIN queues q ON q.name = u.queue AND q.deleted_at IS NULL
     WHERE NOT EXISTS (SELECT 1 FROM partitions e WHERE e.queue_id = q.id AND e.name = u.partition)
     ORDER BY 1, 2
    ON CONFLICT ON CONSTRAINT partitions_queue_id_name_key DO NOTHING
    RETURNING p.id)
  SELECT array_agg(id ORDER BY id) INTO made FROM new;
  IF made IS NOT NULL THEN
    INSERT INTO cursors (partition_id, group_id, queue_id, position, start_at)
    SELECT p.id, g.id, p.queue_id, CASE WHEN g.start_at IS NULL THEN 0 ELSE -1 END, g.start_at
      FROM partitions p JOIN groups g ON g.queue_id = p.queue_id AND g.mode IS NOT NULL
     WHERE p.id = ANY (made) AND p.id > g.discover_to ORDER BY p.id, g.id;
  END IF;
  RETURN QUERY
    SELECT u.ord, q.id, p.id
      FROM unnest(p_queues, p_partitions) WITH ORDINALITY AS u (queue, partition, ord)
      JOIN queues q ON q.name = u.queue AND q.deleted_at IS NULL
      JOIN partitions p ON p.queue_id = q.id AND p.name = u.partition;
END $$;
