"""Record who changed what and when: a log line, and a row in PostgreSQL.

The row is written before the change is answered, so every answered change is listed here. While
PostgreSQL is down, entries (of topics and routes, which can change then too) wait in memory, up to
`MAX_WAITING`, and are written with the next one or when the list is read.

At most `KEPT_ENTRIES` entries are kept for `KEPT_DAYS`. Each write removes a few of the oldest, so
no other job has to.
"""

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import asyncpg
import msgspec

from penstock.contract.broker import AuditEntry, AuditPage
from penstock.contract.queries import AuditQuery
from penstock.database import Database
from penstock.database.rows import struct_of
from penstock.errors import PenstockError
from penstock.protocol.times import epoch_millis

log = logging.getLogger("penstock.audit")

Record = Callable[[str, str, str, dict[str, Any]], Awaitable[None]]  # who, action, object, detail

KEPT_DAYS = 365
KEPT_ENTRIES = 200_000
MAX_WAITING = 1000
MAX_TEXT = 500  # characters of a value

WRITE = """
WITH written AS (
  INSERT INTO audit (at, who, action, object, detail, broker)
  SELECT * FROM unnest($1::timestamptz[], $2::text[], $3::text[], $4::text[], $5::jsonb[],
                       $6::text[])
  RETURNING id)
DELETE FROM audit WHERE id IN (
  SELECT id FROM audit
   WHERE id <= (SELECT max(id) FROM written) - $7 OR at < now() - make_interval(days => $8)
   ORDER BY id LIMIT 100)"""
PAGE = """
SELECT id, at, who, action, object, detail::text AS detail
  FROM audit
 WHERE ($1::bigint IS NULL OR id < $1)
   AND ($2 = '' OR strpos(lower(concat_ws(' ', who, action, object)), lower($2)) > 0)
 ORDER BY id DESC LIMIT $3"""


class Audit:
    def __init__(self, database: Database, broker: str) -> None:
        self._database = database
        self._broker = broker  # the name of this process
        self._waiting: deque[AuditEntry] = deque(maxlen=MAX_WAITING)  # not in PostgreSQL yet

    async def record(self, who: str, action: str, object: str, detail: dict[str, Any]) -> None:
        """Log a change and store it. It never raises, because the change has happened."""
        values = {name: _short(value) for name, value in detail.items()}
        entry = AuditEntry(1000 * time.time(), _short(who), action, _short(object), values)
        about = "".join(f" {name}={value}" for name, value in values.items())
        log.info("%s: %s %s%s", entry.who, action, entry.object, about)
        self._waiting.append(entry)
        await self._write()

    async def _write(self) -> None:
        entries = list(self._waiting)
        if not entries or not self._database.healthy:
            return
        columns = [
            [datetime.fromtimestamp(entry.at / 1000, UTC) for entry in entries],
            [entry.who for entry in entries],
            [entry.action for entry in entries],
            [entry.object for entry in entries],
            [msgspec.json.encode(entry.detail).decode() for entry in entries],
            [self._broker] * len(entries),
        ]
        self._waiting.clear()  # before the wait, so that no other call writes them too
        try:
            await self._database.fetch(WRITE, *columns, KEPT_ENTRIES, KEPT_DAYS)
        except (PenstockError, asyncpg.PostgresError) as error:
            log.warning("%d audit entries wait for PostgreSQL: %s", len(entries), error)
            self._waiting.extendleft(reversed(entries))

    async def page(self, wanted: AuditQuery) -> AuditPage:
        """Return the newest entries that match, and where the next page begins."""
        await self._write()
        rows = await self._database.browse(PAGE, wanted.before, wanted.filter, wanted.limit)
        entries = [
            struct_of(
                AuditEntry,
                row,
                at=epoch_millis(row["at"]),
                detail=msgspec.json.decode(row["detail"]),
            )
            for row in rows
        ]
        return AuditPage(entries, rows[-1]["id"] if len(rows) == wanted.limit else None)


def _short(value: Any) -> Any:
    """Shorten a value for a row: PostgreSQL refuses NUL, and a megabyte is not readable."""
    if isinstance(value, str):
        return value[:MAX_TEXT].replace("\0", "\ufffd")
    if isinstance(value, bool | int | float) or value is None:
        return value
    return _short(msgspec.json.encode(value).decode())
