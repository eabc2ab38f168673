"""Push and acknowledge inside transactions of your own, on the database that the brokers use.

    from penstock import outbox

    async with connection.transaction():
        await connection.execute("INSERT INTO orders ...")
        await outbox.push(connection, "orders", {"id": 7}, partition="c-1")

The message is there when the transaction is committed, and never was when it is rolled back.
Likewise `outbox.ack(connection, message)`: the effect of the work and its acknowledgement are one
commit, so each message takes effect once. Connections are those of asyncpg, psycopg (async) and
SQLAlchemy (AsyncConnection, AsyncSession); `penstock.outbox.sync` has the same for blocking ones.

Nothing here talks to a broker. Each call is one SQL function (`outbox_push`, `outbox_ack`), which
remembers what was asked for; the commit does it. docs/how-to/outbox.md has the contract.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from penstock.outbox import calls
from penstock.outbox.calls import LeasedMessage
from penstock.outbox.drivers import LeaseLost, fetch, is_lease_lost
from penstock.protocol.names import DEFAULT_PARTITION

__all__ = [
    "LeaseLost",
    "LeasedMessage",
    "Outbox",
    "ack",
    "dead_letter",
    "is_lease_lost",
    "push",
    "push_many",
    "retry",
]


class Outbox:
    """The outbox of brokers whose tables are in `schema` (the setting `database.db_schema`)."""

    def __init__(self, schema: str = "penstock") -> None:
        self.schema = schema

    async def push(  # noqa: PLR0913 public, by keyword
        self,
        connection: Any,
        queue: str,
        payload: Any,
        *,
        partition: str = DEFAULT_PARTITION,
        transaction_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: float | None = None,
        deliver_at: datetime | None = None,
        trace_id: str | None = None,
    ) -> str:
        """Push a message when the connection's transaction commits. Returns its transaction id.

        The commit fails if the queue is full by then (`maxSize`, SQLSTATE PQ002).
        """
        call = calls.push(
            queue,
            payload,
            partition,
            transaction_id,
            calls.Extras(headers, delay, deliver_at, trace_id),
        )
        return str(await self._fetch(connection, call))

    async def push_many(
        self,
        connection: Any,
        queue: str,
        payloads: Iterable[Any],
        *,
        partition: str = DEFAULT_PARTITION,
        headers: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Push messages, in order, when the transaction commits. Returns their transaction ids."""
        call = calls.push_many(queue, payloads, partition, headers)
        return list(await self._fetch(connection, call))

    async def ack(self, connection: Any, message: LeasedMessage) -> None:
        """Acknowledge a message when the transaction commits.

        Raises `LeaseLost` if another consumer may have the message by now: roll back. If the lease
        is lost between this call and the commit, the commit fails; `is_lease_lost` recognises the
        error.
        """
        await self._answer(connection, calls.ack(message, "completed"), message)

    async def retry(
        self, connection: Any, message: LeasedMessage, error: str | None = None
    ) -> None:
        """Have a message delivered again when the transaction commits. No attempt is counted."""
        await self._answer(connection, calls.ack(message, "retry", error), message)

    async def dead_letter(self, connection: Any, message: LeasedMessage, error: str) -> None:
        """Move a message to the dead letters when the transaction commits."""
        await self._answer(connection, calls.ack(message, "dlq", error), message)

    async def _answer(self, connection: Any, call: calls.Call, message: LeasedMessage) -> None:
        await self._fetch(connection, call)
        calls.staged(message)

    async def _fetch(self, connection: Any, call: calls.Call) -> Any:
        return await fetch(connection, self.schema, call)


_outbox = Outbox()
push = _outbox.push
push_many = _outbox.push_many
ack = _outbox.ack
retry = _outbox.retry
dead_letter = _outbox.dead_letter
