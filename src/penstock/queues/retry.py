"""What is done when the database does not take a batch: once more, then in halves.

The one policy on the way from a request or a buffer file to the database. A call whose outcome is
unknown (its connection was lost) is repeated, which is safe: transaction ids are fixed before the
first attempt. A batch whose content is refused is halved until the culprit is alone, so that one
bad message fails by itself. Below it `Database.fetch` repeats a statement that lost a deadlock,
of which nothing was done.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.errors import Unavailable

T = TypeVar("T")
R = TypeVar("R")

MAX_ATTEMPTS = 6
RETRY_SECONDS = 0.05  # more with each attempt


async def retrying(
    call: Callable[[bool], Awaitable[R]], transient: Callable[[Unavailable], bool], made: int = 0
) -> R:
    """`call(again)`, repeated while it fails with what is `transient`; `again` after the first.
    `made`: the attempts before this.
    """
    for attempt in range(made, MAX_ATTEMPTS):
        try:
            return await call(attempt > 0)
        except Unavailable as error:
            if attempt == MAX_ATTEMPTS - 1 or not transient(error):
                raise
            await asyncio.sleep(RETRY_SECONDS * attempt)
    raise AssertionError("unreachable")


async def halving(
    batch: list[T],
    send: Callable[[list[T]], Awaitable[list[R]]],
    refused: tuple[type[Exception], ...],
    alone: Callable[[T, Exception], R],
) -> list[R]:
    """The outcomes of `send`, in order; `alone(one, error)` for one that was refused by itself."""
    try:
        return await send(batch)
    except refused as error:
        if len(batch) == 1:
            return [alone(batch[0], error)]
    middle = len(batch) // 2
    first = await halving(batch[:middle], send, refused, alone)
    return first + await halving(batch[middle:], send, refused, alone)
