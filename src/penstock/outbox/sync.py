"""The outbox for blocking connections: psycopg, and SQLAlchemy's Connection and Session with any
driver.

    from penstock.outbox import sync as outbox

    with Session(engine) as session, session.begin():
        session.add(Order(id=7))
        outbox.push(session, "orders", {"id": 7}, partition="c-1")
"""

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from penstock.outbox import LeasedMessage, Outbox
from penstock.outbox.drivers import Argument, LeaseLost, fetch_sync, is_lease_lost

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


P = ParamSpec("P")
T = TypeVar("T")


class _BlockingOutbox(Outbox):
    """An outbox whose coroutines never suspend, so that one `send` runs each to its end."""

    async def _call(self, connection: Any, function: str, *arguments: Argument) -> Any:
        return fetch_sync(connection, self.schema, function, arguments)


def _blocking(
    method: Callable[Concatenate[Outbox, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    @functools.wraps(method)
    def call(self: "SyncOutbox", /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            method(_BlockingOutbox(self.schema), *args, **kwargs).send(None)
        except StopIteration as ended:
            result: T = ended.value
            return result
        raise AssertionError("a blocking call waits for nothing")

    return call


class SyncOutbox:
    """`Outbox` for blocking connections: the same methods, called without `await`."""

    def __init__(self, schema: str = "penstock") -> None:
        self.schema = schema

    push = _blocking(Outbox.push)
    push_many = _blocking(Outbox.push_many)
    ack = _blocking(Outbox.ack)
    retry = _blocking(Outbox.retry)
    dead_letter = _blocking(Outbox.dead_letter)


_outbox = SyncOutbox()
push = _outbox.push
push_many = _outbox.push_many
ack = _outbox.ack
retry = _outbox.retry
dead_letter = _outbox.dead_letter
