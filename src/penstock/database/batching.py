"""Requests that arrive together share one call of the database: group commit across requests.

What limits a queue on PostgreSQL is commits. A request that comes while no call is under way is
sent at once; those that come meanwhile wait together and go out as one call. Under light load
nothing waits, under heavy load the calls grow by themselves.

A further call beside one under way has a price of its own, so it waits until about half of those
who take part are there, or `GATHER_SECONDS` have passed: two halves that alternate, instead of a
large call and many of one request.

A call whose connection was lost is repeated (retry.py): every kind of call is safe to repeat, and
says why. A batch whose content is refused is halved until the culprit is alone, so that one bad
request fails by itself.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import asyncpg

from penstock.database.retry import ATTEMPTS, LOST_SECONDS
from penstock.errors import InvalidRequest, PenstockError, Unavailable

log = logging.getLogger("penstock.database")

T = TypeVar("T")
R = TypeVar("R")

SLICE = 1000  # items of a large call handled before others get a turn
GATHER_SECONDS = 0.005  # the longest that a request waits for others beside a call
REFUSED = (  # by the database, for the content of the call
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
)


Submission = tuple[T, int, asyncio.Future[R]]  # a request, its size, and what it waits for


class Batcher(Generic[T, R]):
    """`call(requests, again)` returns a result or an error per request; `again`: the call before
    had an unknown outcome.
    """

    def __init__(
        self,
        call: Callable[[list[T], bool], Awaitable[list[R | PenstockError]]],
        *,
        limit: int,
        slots: int,
        size: Callable[[T], int] = lambda _: 1,
        enough: int = 0,
        unclaimed: Callable[[R], None] = lambda _: None,
    ) -> None:
        self._call = call
        self._size = size
        self._limit = limit  # the size of one call, unless one request is larger
        self._slots = slots  # calls at a time
        self._enough = enough  # a further call is worth it from this size; 0: half of the others
        self._unclaimed = unclaimed  # takes a result whose request was cancelled meanwhile
        self._waiting: deque[Submission[T, R]] = deque()  # requests that wait for a call
        self._waiting_size = 0  # the sum of their sizes
        self._busy = 0  # calls under way
        self._under_way = 0  # requests in these calls
        self._level = 0  # requests waiting or under way, the most of late
        self._timer: asyncio.TimerHandle | None = None  # set while some wait beside a free slot
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> list[T]:
        """The requests that wait for a call."""
        return [request for request, _, _ in self._waiting]

    def submit(self, request: T) -> "asyncio.Future[R]":
        """The future of the request's result. Cancelling it before the request is sent takes it
        back; after that its result goes to `unclaimed`.
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        size = self._size(request)
        self._waiting.append((request, size, future))
        self._waiting_size += size
        if self._busy < self._slots:
            if not self._busy or self._is_worth_a_call():
                self._start()
            elif not self._enough:
                self._gather()
        return future

    async def ask(self, request: T) -> R:
        """The request's result. It goes to `unclaimed` if this is cancelled."""
        future = self.submit(request)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:
                self._unclaimed(future.result())
            raise

    async def drain(self) -> None:
        """Wait for the calls under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _is_worth_a_call(self) -> bool:
        """Whether those who wait should go beside a call that is under way."""
        if self._enough:
            return self._waiting_size >= self._enough
        return len(self._waiting) >= self._level // 2

    def _gather(self) -> None:
        """Have those who wait sent soon, however few they are by then."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._start)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting and self._busy < self._slots:
            self._busy += 1
            task = asyncio.create_task(self._serve())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self) -> None:
        """Send what waits, call after call, until nothing does or it is not worth a call."""
        try:
            while self._waiting:
                self._level = max(self._under_way + len(self._waiting), self._level * 7 // 8)
                batch: list[Submission[T, R]] = []
                total = 0
                while self._waiting and (not batch or total + self._waiting[0][1] <= self._limit):
                    submission = self._waiting.popleft()
                    _, size, future = submission
                    self._waiting_size -= size
                    if not future.cancelled():
                        batch.append(submission)
                        total += size
                self._under_way += len(batch)
                try:
                    outcomes = await self._send([request for request, _, _ in batch])
                finally:
                    self._under_way -= len(batch)
                if self._waiting:
                    # Once the next call is on its way: completing takes as long as a small call.
                    asyncio.get_running_loop().call_soon(self._complete, batch, outcomes)
                    if not (self._busy == 1 or self._enough or self._is_worth_a_call()):
                        self._gather()
                        break
                else:
                    self._complete(batch, outcomes)
        finally:
            self._busy -= 1

    async def _send(self, requests: list[T]) -> list[R | PenstockError]:
        """The outcome of each request, whatever happens."""
        attempt = 0
        while requests:
            try:
                return await self._call(requests, attempt > 0)
            except REFUSED as error:
                if len(requests) == 1:
                    log.warning("the database refused a request: %s", error)
                    return [InvalidRequest("the database refused the data of this request")]
                middle = len(requests) // 2
                return await self._send(requests[:middle]) + await self._send(requests[middle:])
            except PenstockError as error:
                transient = isinstance(error, Unavailable) and error.retry_after < 1
                attempt += 1
                if attempt == ATTEMPTS or not transient:
                    return [error] * len(requests)
                await asyncio.sleep(LOST_SECONDS * (attempt - 1))
            except Exception:
                log.exception("a call for %d requests failed", len(requests))
                return [Unavailable("an internal error; see the broker's log")] * len(requests)
        return []

    def _complete(self, batch: list[Submission[T, R]], outcomes: list[R | PenstockError]) -> None:
        for (_, _, future), outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, PenstockError):
                if not future.done():
                    future.set_exception(outcome)
            elif future.done():
                self._unclaimed(outcome)
            else:
                future.set_result(outcome)


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
