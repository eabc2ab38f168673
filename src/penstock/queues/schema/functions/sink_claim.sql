-- A task of an exactly-once sink wants to write rows with this checksum to a queue. Answers `write`, `wait` for `tasks`,
-- or why not: `other` rows have this place, the batch is `behind` the newest, or `complete` without such a task.
-- The rules are those of penstock/topics/write_claims.py. Rows of a queue that was deleted since count for nothing.
CREATE FUNCTION sink_claim(
    p_target text, p_app text, p_batch bigint, p_task integer, p_checksum text, p_run text, p_note text,
    OUT verdict text, OUT newest bigint, OUT note text, OUT tasks integer[])
LANGUAGE plpgsql AS $$
DECLARE
    place sink_tasks;
    queue bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('sink ' || p_target || ' ' || p_app, 0));
    SELECT q.id INTO queue FROM queues q WHERE q.name = p_target AND q.deleted_at IS NULL;
    IF queue IS NOT NULL THEN
        DELETE FROM sink_tasks s WHERE s.target = p_target AND s.app = p_app AND s.queue_id <> queue;
        UPDATE sink_tasks s SET queue_id = queue WHERE s.target = p_target AND s.app = p_app AND s.queue_id IS NULL;
    END IF;
    tasks := '{}';
    note := '';
    SELECT greatest(max(s.batch), p_batch) INTO newest FROM sink_tasks s WHERE s.target = p_target AND s.app = p_app;
    SELECT * INTO place FROM sink_tasks s
     WHERE s.target = p_target AND s.app = p_app AND s.batch = p_batch AND s.task = p_task;
    IF FOUND THEN
        note := place.note;
        IF place.checksum <> p_checksum THEN
            verdict := 'other';
            RETURN;
        END IF;
        UPDATE sink_tasks s SET run = p_run, claimed_at = now()
         WHERE s.target = p_target AND s.app = p_app AND s.batch = p_batch AND s.task = p_task;
        verdict := 'write';
        RETURN;
    END IF;
    IF p_batch < newest THEN
        verdict := 'behind';
        RETURN;
    END IF;
    PERFORM 1 FROM sink_tasks s WHERE s.target = p_target AND s.app = p_app AND s.batch = p_batch AND s.task = -1;
    IF FOUND THEN
        verdict := 'complete';
        RETURN;
    END IF;
    tasks := ARRAY(SELECT s.task FROM sink_tasks s
                    WHERE s.target = p_target AND s.app = p_app AND s.batch = p_batch AND s.run <> p_run
                    ORDER BY s.task);
    IF cardinality(tasks) > 0 THEN
        verdict := 'wait';
        RETURN;
    END IF;
    INSERT INTO sink_tasks (target, app, batch, task, queue_id, checksum, run, note)
    VALUES (p_target, p_app, p_batch, p_task, queue, p_checksum, p_run, p_note);
    DELETE FROM sink_tasks s WHERE s.target = p_target AND s.app = p_app AND s.batch <= p_batch - 4;
    note := p_note;
    verdict := 'write';
END $$;
