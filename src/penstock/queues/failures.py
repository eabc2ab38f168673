"""Record which worker reported that a message failed, and when, for the message's timeline.

A lease stores no worker name, because that would slow down every pop. But the worker that took a
message also answers it, and few answers say `failed`, `retry` or `dlq`. Accepted answers of this
kind are collected in memory and written in batches, outside of the queue's transactions. No request
waits for the write, and successful messages cost nothing. The record is not complete: notes are
dropped while PostgreSQL is down or when too many messages fail, and a crash loses the last ones.

The newest `KEPT_ROWS` are kept: each write also deletes some of the oldest.
"""

import asyncio
import logging
from collections import deque
from datetime import UTC, datetime

import asyncpg

from penstock.errors import PenstockError
from penstock.io.tasks import cancelled
from penstock.queues.context import QueueContext
from penstock.queues.types import Ack

log = logging.getLogger("penstock.queues")

WRITE_SECONDS = 0.5  # between two writes
MAX_WAITING = 500  # notes; more are dropped until the next write
MAX_TEXT = 500  # characters of an error
KEPT_ROWS = 200_000

WRITE = """
WITH written AS (
  INSERT INTO failures (at, partition_id, seq, group_name, worker, error)
  SELECT f.at, f.partition_id, m.seq, f.group_name, f.worker, f.error
    FROM unnest($1::timestamptz[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::text[])
         AS f (at, partition_id, transaction_id, group_name, worker, error)
   CROSS JOIN LATERAL message_named(f.partition_id, f.transaction_id) m
  RETURNING id)
DELETE FROM failures WHERE id IN (
  SELECT id FROM failures WHERE id <= (SELECT max(id) FROM written) - $7 ORDER BY id LIMIT 1000)"""

Note = tuple[datetime, int, str, str, str, str]


class Failures:
    def __init__(self, context: QueueContext) -> None:
        self._database, self._catalog = context.database, context.catalog
        self._waiting: deque[Note] = deque()
        self._writing: asyncio.Task[None] | None = None  # runs while notes wait

    def note(self, ack: Ack) -> None:
        """Record an accepted answer that says that the message failed."""
        partition = self._catalog.partition_id(ack.partition_id)
        if ack.worker is None or partition is None or len(self._waiting) >= MAX_WAITING:
            return
        error, worker = (
            text[:MAX_TEXT].replace("\0", "\ufffd")
            for text in (ack.error or ack.status, ack.worker)
        )
        self._waiting.append(
            (datetime.now(UTC), partition, ack.transaction_id, ack.group, worker, error)
        )
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def stop(self) -> None:
        await cancelled(self._writing)
        await self._write_now()

    async def _write(self) -> None:
        while self._waiting:
            await asyncio.sleep(WRITE_SECONDS)
            await self._write_now()

    async def _write_now(self) -> None:
        notes = list(self._waiting)
        self._waiting.clear()
        if not notes or not self._database.healthy:
            return
        columns = [list(column) for column in zip(*notes, strict=True)]
        try:
            await self._database.fetch(WRITE, *columns, KEPT_ROWS)
        except (PenstockError, asyncpg.PostgresError) as error:
            log.debug("the failures of %d messages were not recorded: %s", len(notes), error)
