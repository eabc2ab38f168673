-- sink_claim: a task of an exactly-once sink wants to write rows with these checksums to a queue. Answers `write` from number
-- `rows` on, `done`, `later` (after `tasks`), or why not: the task has written `other` rows, or the batch is `behind` the newest.
-- The rules are those of penstock/topics/write_claims.py. Rows of a queue that was deleted since count for nothing.
CREATE FUNCTION sink_claim(
    p_target text, p_app text, p_batch bigint, p_task integer, p_checksum text, p_run text, p_note text, p_keys text,
    OUT verdict text, OUT newest bigint, OUT note text, OUT tasks integer[], OUT rows bigint)
LANGUAGE plpgsql AS $$
DECLARE
    stored sink_tasks;
    queue bigint;
    committed boolean;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('sink ' || p_target || ' ' || p_app, 0));
    SELECT q.id INTO queue FROM queues q WHERE q.name = p_target AND q.deleted_at IS NULL;
    IF queue IS NOT NULL THEN
        DELETE FROM sink_tasks s WHERE s.target = p_target AND s.app = p_app AND s.queue_id <> queue;
        UPDATE sink_tasks s SET queue_id = queue WHERE s.target = p_target AND s.app = p_app AND s.queue_id IS NULL;
    END IF;
    tasks := '{}';
    note := '';
    rows := 0;
    SELECT greatest(max(s.batch), p_batch), coalesce(bool_or(s.batch = p_batch AND s.task = -1), false)
      INTO newest, committed FROM sink_tasks s WHERE s.target = p_target AND s.app = p_app;
    SELECT * INTO stored FROM sink_tasks s
     WHERE s.target = p_target AND s.app = p_app AND s.batch = p_batch AND s.task = p_task;
    IF FOUND THEN
        note := stored.note;
        rows := stored.rows;
        IF stored.done OR committed THEN
            verdict := CASE WHEN coalesce(nullif(stored.keys, ''), stored.checksum) = coalesce(nullif(p_keys, ''), p_checksum)
                            THEN 'done' ELSE 'other' END;
        ELSE
            verdict := CASE WHEN stored.checksum = p_checksum THEN 'write' ELSE 'other' END;
        END IF;
        IF verdict <> 'other' THEN
            UPDATE sink_tasks s SET run = p_run, claimed_at = now()
             WHERE s.target = p_target AND s.app = p_app AND s.batch = p_batch AND s.task = p_task;
        END IF;
        RETURN;
    END IF;
    IF p_batch < newest OR committed THEN
        verdict := CASE WHEN p_batch < newest THEN 'behind' ELSE 'other' END;
        RETURN;
    END IF;
    tasks := ARRAY(SELECT s.task FROM sink_tasks s
                    WHERE s.target = p_target AND s.app = p_app AND s.batch = p_batch AND s.run <> p_run
                    ORDER BY s.task);
    IF cardinality(tasks) > 0 THEN
        verdict := 'later';
        RETURN;
    END IF;
    INSERT INTO sink_tasks (target, app, batch, task, queue_id, checksum, run, note, keys)
    VALUES (p_target, p_app, p_batch, p_task, queue, p_checksum, p_run, p_note, p_keys);
    DELETE FROM sink_tasks s WHERE s.target = p_target AND s.app = p_app AND s.batch <= p_batch - 4;
    note := p_note;
    verdict := 'write';
END $$;
