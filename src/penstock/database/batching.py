"""Send concurrent requests to the database in shared calls: group commit across requests.

Commits limit the rate of a queue on PostgreSQL. A request that arrives while no call is under way
is sent at once. Requests that arrive during a call wait and share the next call. So nothing waits
under light load, and calls become larger under heavy load.

A second concurrent call has its own cost. It starts when about half of the recent requests wait, or
after `GATHER_SECONDS`. So two calls of about half the requests alternate, instead of one large call
and many small ones. A batcher with `enough` starts it when so much waits, whatever was recent.

A call that lost its connection is repeated (retry.py); every kind of call is safe to repeat, for
the reason in its code. A batch that the database refuses because of its content is halved until the
bad request is alone, so only that request fails.
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

SLICE = 1000  # items of a large call handled before other tasks run
GATHER_SECONDS = 0.005  # the longest wait for more requests while a slot is free
REFUSED = (  # the database refuses the content of the call
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
)


Submission = tuple[T, int, asyncio.Future[R]]  # a request, its size, and its result


class Batcher(Generic[T, R]):
    """Combine requests into calls. `call(requests, again)` returns a result or an error for each
    request. `again` is true if an earlier attempt may have been executed.
    """

    def __init__(
        self,
        call: Callable[[list[T], bool], Awaitable[list[R | PenstockError]]],
        *,
        limit: int,
        slots: int,
        enough: int = 0,
        give_back: Callable[[R], None] = lambda _: None,
    ) -> None:
        self._call = call
        self._limit = limit  # the size of one call, unless one request is larger
        self._slots = slots  # calls at a time
        # Waiting size that starts a further call. 0: half of `_level` requests, or GATHER_SECONDS
        self._enough = enough
        self._give_back = give_back  # gets the result of a cancelled request
        self._waiting: deque[Submission[T, R]] = deque()  # requests that wait for a call
        self._waiting_size = 0  # the sum of their sizes
        self._busy = 0  # calls under way
        self._under_way = 0  # requests in these calls
        self._level = 0  # recent maximum of requests waiting or under way; decays
        self._timer: asyncio.TimerHandle | None = None  # set while requests gather
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> list[T]:
        """Return the requests that wait for a call."""
        return [request for request, _, _ in self._waiting]

    def submit(self, request: T, size: int = 1) -> "asyncio.Future[R]":
        """Queue a request and return the future of its result. Cancelling the future before the
        request is sent withdraws it. Later, the result goes to `give_back`.
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, size, future))
        self._waiting_size += size
        if self._busy < self._slots:
            if not self._busy or self._is_worth_a_call():
                self._start()
            elif not self._enough:
                self._gather()
        return future

    async def ask(self, request: T, size: int = 1) -> R:
        """Return the result of a request. It goes to `give_back` if this task is cancelled."""
        future = self.submit(request, size)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:
                self._give_back(future.result())
            raise

    async def drain(self) -> None:
        """Wait for the calls under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _is_worth_a_call(self) -> bool:
        """Check whether enough requests wait for a further concurrent call."""
        if self._enough:
            return self._waiting_size >= self._enough
        return len(self._waiting) >= self._level // 2

    def _gather(self) -> None:
        """Send the waiting requests after GATHER_SECONDS, however few they are by then."""
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
        """Send the waiting requests, call after call, until too few wait for a further call."""
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
                    # Send the next call first: completing takes as long as a small call.
                    asyncio.get_running_loop().call_soon(self._complete, batch, outcomes)
                    # With `enough`, or if this is the only call, the next one follows at once.
                    if not (self._busy == 1 or self._enough or self._is_worth_a_call()):
                        self._gather()
                        break
                else:
                    self._complete(batch, outcomes)
        finally:
            self._busy -= 1

    async def _send(self, requests: list[T]) -> list[R | PenstockError]:
        """Return the outcome of each request: a result or an error."""
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
                self._give_back(outcome)
            else:
                future.set_result(outcome)
