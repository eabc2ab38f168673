"""The outbox for blocking connections: psycopg, and SQLAlchemy's Connection and Session with any
driver.

    from penstock.outbox import sync as outbox

    with Session(engine) as session, session.begin():
        session.add(Order(id=7))
        outbox.push(session, "orders", {"id": 7}, partition="c-1")
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from penstock.outbox import calls
from penstock.outbox.calls import LeasedMessage
from penstock.outbox.drivers import LeaseLost, fetch_sync, is_lease_lost
from penstock.protocol.names import DEFAULT_PARTITION

__all__ = [
    "LeaseLost",
    "LeasedMessage",
    "SyncOutbox",
    "ack",
    "dead_letter",
    "is_lease_lost",
    "push",
    "push_many",
    "retry",
]


class SyncOutbox:
    """`Outbox` for blocking connections."""

    def __init__(self, schema: str = "penstock") -> None:
        self.schema = schema

    def push(  # noqa: PLR0913 public, by keyword
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
        """See `Outbox.push`."""
        call = calls.push(
            queue,
            payload,
            partition,
            transaction_id,
            calls.Extras(headers, delay, deliver_at, trace_id),
        )
        return str(fetch_sync(connection, self.schema, call))

    def push_many(
        self,
        connection: Any,
        queue: str,
        payloads: Iterable[Any],
        *,
        partition: str = DEFAULT_PARTITION,
        headers: Mapping[str, str] | None = None,
    ) -> list[str]:
        """See `Outbox.push_many`."""
        call = calls.push_many(queue, payloads, partition, headers)
        return list(fetch_sync(connection, self.schema, call))

    def ack(self, connection: Any, message: LeasedMessage) -> None:
        """See `Outbox.ack`."""
        self._answer(connection, calls.ack(message, "completed"), message)

    def retry(self, connection: Any, message: LeasedMessage, error: str | None = None) -> None:
        """See `Outbox.retry`."""
        self._answer(connection, calls.ack(message, "retry", error), message)

    def dead_letter(self, connection: Any, message: LeasedMessage, error: str) -> None:
        """See `Outbox.dead_letter`."""
        self._answer(connection, calls.ack(message, "dlq", error), message)

    def _answer(self, connection: Any, call: calls.Call, message: LeasedMessage) -> None:
        fetch_sync(connection, self.schema, call)
        calls.staged(message)


_outbox = SyncOutbox()
push = _outbox.push
push_many = _outbox.push_many
ack = _outbox.ack
retry = _outbox.retry
dead_letter = _outbox.dead_letter
