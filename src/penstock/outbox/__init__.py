"""Push and acknowledge inside transactions of your own, on the database that the brokers use.

    from penstock import outbox

    async with connection.transaction():
        await connection.execute("INSERT INTO orders ...")
        await outbox.push(connection, "orders", {"id": 7}, partition="c-1")

The message is stored when the transaction commits, and never if it rolls back. Likewise
`outbox.ack(connection, message)`: the effect of the work and its acknowledgement are one commit, so
each message takes effect once. Connections are those of asyncpg, psycopg (async) and
SQLAlchemy (AsyncConnection, AsyncSession); `penstock.outbox.sync` has the same for blocking ones.

Each call is one SQL function (`outbox_push`, `outbox_ack`) that records what the commit will do. No
broker is involved. docs/how-to/outbox.md has the contract.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Protocol

from penstock.errors import InvalidRequest
from penstock.outbox.drivers import Argument, LeaseLost, fetch, is_lease_lost
from penstock.protocol.headers import encode
from penstock.protocol.payload import encode_payload

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


class LeasedMessage(Protocol):
    """The fields of a message that an acknowledgement needs; `penstock.Message` has them."""

    @property
    def transaction_id(self) -> str: ...
    @property
    def partition_id(self) -> str: ...
    @property
    def lease_id(self) -> str: ...
    @property
    def consumer_group(self) -> str: ...


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
        partition: str | None = None,
        transaction_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: float | None = None,
        deliver_at: datetime | None = None,
        trace_id: str | None = None,
    ) -> str:
        """Push a message when the connection's transaction commits. Returns its transaction id.

        The payload is one that `Client.push` takes. The commit fails if the queue is full by then
        (`maxSize`, SQLSTATE PQ002).
        """
        if delay is not None and deliver_at is not None:
            raise InvalidRequest("give delay or deliver_at, not both")
        if deliver_at is not None and deliver_at.tzinfo is None:
            raise InvalidRequest("deliver_at needs a time zone, such as datetime.now(UTC) has")
        answer = await self._call(
            connection,
            "outbox_push",
            ("text", queue),
            ("json", _json(payload)),
            ("text", partition),
            ("text", transaction_id),
            ("jsonb", _headers(headers)),
            ("double precision", None if delay is None else repr(float(delay))),
            ("timestamptz", deliver_at.isoformat() if deliver_at else None),
            ("uuid", trace_id),
        )
        return str(answer)

    async def push_many(
        self,
        connection: Any,
        queue: str,
        payloads: Iterable[Any],
        *,
        partition: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Push messages, in order, when the transaction commits. Returns their transaction ids."""
        answer = await self._call(
            connection,
            "outbox_push_many",
            ("text", queue),
            ("json", f"[{','.join(map(_json, payloads))}]"),
            ("text", partition),
            ("jsonb", _headers(headers)),
        )
        return list(answer)

    async def ack(self, connection: Any, message: LeasedMessage) -> None:
        """Acknowledge a message when the transaction commits.

        Raises `LeaseLost` if another consumer may have the message already: roll back. If the lease
        is lost between this call and the commit, the commit fails; `is_lease_lost` recognises the
        error.
        """
        await self._ack(connection, message, "completed")

    async def retry(
        self, connection: Any, message: LeasedMessage, error: str | None = None
    ) -> None:
        """Have a message delivered again when the transaction commits. No attempt is counted."""
        await self._ack(connection, message, "retry", error)

    async def dead_letter(self, connection: Any, message: LeasedMessage, error: str) -> None:
        """Move a message to the dead letters when the transaction commits."""
        await self._ack(connection, message, "dlq", error)

    async def _ack(
        self, connection: Any, message: LeasedMessage, status: str, error: str | None = None
    ) -> None:
        if not message.lease_id:
            raise InvalidRequest("this message has no lease: it was taken with auto_ack")
        await self._call(
            connection,
            "outbox_ack",
            ("uuid", message.partition_id),
            ("text", message.transaction_id),
            ("uuid", message.lease_id),
            ("text", message.consumer_group),
            ("text", status),
            ("text", error),
        )
        # The client can stop renewing the lease.
        notify = getattr(message, "answered_elsewhere", None)
        if notify is not None:
            notify()

    async def _call(self, connection: Any, function: str, *arguments: Argument) -> Any:
        return await fetch(connection, self.schema, function, arguments)


def _json(payload: Any) -> str:
    return bytes(encode_payload(payload)).decode()


def _headers(headers: Mapping[str, str] | None) -> str | None:
    encoded = encode(headers) if headers else None
    return None if encoded is None else encoded.decode()


_outbox = Outbox()
push = _outbox.push
push_many = _outbox.push_many
ack = _outbox.ack
retry = _outbox.retry
dead_letter = _outbox.dead_letter
