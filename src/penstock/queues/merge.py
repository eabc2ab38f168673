"""Merges concurrent requests of one kind into one database call: group commit across requests.

What limits a queue on PostgreSQL is commits, so requests share them. A request that finds a free
slot is sent at the end of the event loop's turn; those that arrive while all slots are busy wait
together and go out as one call as soon as a slot is free. Under light load nothing waits, under
heavy load calls grow by themselves.

A further call beside one under way has a price of its own, so it waits until about half of those
who take part are there, or `GATHER_SECONDS` have passed: two halves that alternate instead of a
large call and many of one request. With three who take part that is one, so nobody waits.

One bad request fails alone, and a lost connection is tried again while the database as a whole is
up (retry.py); the kinds merged here are safe to repeat (each says why).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar, cast

import asyncpg

from penstock.errors import InvalidRequest, PenstockError, Unavailable
from penstock.queues.retry import halving, retrying

log = logging.getLogger("penstock.queues")

T = TypeVar("T")
R = TypeVar("R")
A = TypeVar("A")

Fetch = Callable[..., Awaitable[list[Any]]]  # of the pool, or of a transaction
SLICE = 1000  # items of a large call handled before others get a turn
GATHER_SECONDS = 0.005  # the longest that a request waits for others while a slot is free
REFUSED = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
)


class Pending(asyncio.Future[R], Generic[T, R]):
    """A request on its way, and the future of its outcome. Cancelled before it is sent, it is not.

    It costs no coroutine: what has to be done with the outcome is done at the moment it is there.
    """

    __slots__ = ("_convert", "_task", "intercept", "request", "size")

    def __init__(self, request: T) -> None:
        super().__init__()
        self.request = request
        self.size = 0  # while it waits in a merger
        # sees the outcome first, also when nobody waits any more; true: it completes us later
        self.intercept: Callable[[Pending[T, R], R | BaseException], bool] | None = None
        self._convert: Callable[[R], Any] | None = None
        self._task: asyncio.Task[Any] | None = None

    def then(self, convert: Callable[[R], A]) -> "Pending[T, A]":
        """This very future, which gets what `convert` makes of the result."""
        if self.done():
            return completed(self.request, convert(self.result()))
        first = self._convert
        self._convert = convert if first is None else lambda result: convert(first(result))
        return cast("Pending[T, A]", self)

    def complete(self, outcome: R | BaseException) -> None:
        intercept, self.intercept = self.intercept, None
        if (intercept is not None and intercept(self, outcome)) or self.done():
            return
        if isinstance(outcome, BaseException):
            self.set_exception(outcome)
            return
        try:
            self.set_result(outcome if self._convert is None else self._convert(outcome))
        except Exception as error:  # noqa: BLE001 - a bug of this answer must not reach those of others
            self.set_exception(error)

    def run(
        self, work: Coroutine[Any, Any, A], then: Callable[[A], object] | None = None
    ) -> "Pending[T, R]":
        """Complete this with what a coroutine comes to, or call `then` with it. It is cancelled
        with this.
        """
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(lambda task: self._finished(task, then))
        return self

    def cancel(self, msg: Any = None) -> bool:
        if self._task is not None:
            self._task.cancel(msg)
        return super().cancel(msg)

    def _finished(self, task: "asyncio.Task[Any]", then: Callable[[Any], object] | None) -> None:
        if task.cancelled():
            self.cancel()
        elif then is None or task.exception() is not None:
            Pending.complete(self, task.exception() or task.result())
        elif not self.done():
            then(task.result())


def completed(request: T, result: R) -> Pending[T, R]:
    """For a request that needs no call."""
    pending: Pending[T, R] = Pending(request)
    pending.complete(result)
    return pending


class Merger(Generic[T, R]):
    """`run(requests, again)` returns a result or error per request; `again`: it is a repetition."""

    def __init__(
        self,
        run: Callable[[list[T], bool], Awaitable[list[R | PenstockError]]],
        *,
        limit: int,
        slots: int,
        size: Callable[[T], int] = lambda _: 1,
        enough: int = 0,
        orphan: Callable[[R], None] | None = None,
    ) -> None:
        self._run = run
        self._size = size
        self._limit = limit  # the size of one call, unless one request is larger
        self._slots = slots  # calls at a time
        self._enough = enough  # a further call is worth it from this size; 0: as said above
        self._orphan = orphan  # takes a result that nobody waits for any more
        self._waiting: deque[Pending[T, R]] = deque()
        self._waiting_size = 0
        self._busy = 0
        self._under_way = 0  # requests in calls
        self._level = 0  # requests waiting or under way, the most of late
        self._gathering: asyncio.TimerHandle | None = None  # while a slot is free and some wait
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> list[T]:
        """Those that wait."""
        return [pending.request for pending in self._waiting]

    def submit(self, pending: Pending[T, R]) -> Pending[T, R]:
        """Have it completed. Cancelling it does not stop a call under way, whose result then goes
        to `orphan`.
        """
        pending.size = self._size(pending.request)
        self._waiting.append(pending)
        self._waiting_size += pending.size
        if self._busy < self._slots:
            if not self._busy or self._is_worth_a_call():
                self._start()
            else:
                self._gather()
        return pending

    def _is_worth_a_call(self) -> bool:
        """Whether those who wait should go beside a call that is under way."""
        if self._enough:
            return self._waiting_size >= self._enough
        return len(self._waiting) >= self._level // 2

    def _gather(self) -> None:
        if self._gathering is None and not self._enough:
            loop = asyncio.get_running_loop()
            self._gathering = loop.call_later(GATHER_SECONDS, self._gathered)

    def _start(self) -> None:
        self._busy += 1
        task = asyncio.create_task(self._serve())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _gathered(self) -> None:
        self._gathering = None
        if self._waiting and self._busy < self._slots:
            self._start()

    async def drain(self) -> None:
        """Wait for the calls under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self) -> None:
        first = True
        try:
            while self._waiting:
                if not (first or self._enough or self._busy == 1 or self._is_worth_a_call()):
                    self._gather()
                    break
                first = False
                if self._gathering is not None:
                    self._gathering.cancel()
                    self._gathering = None
                taking_part = self._under_way + len(self._waiting)
                self._level = max(taking_part, self._level * 7 // 8)
                batch: list[Pending[T, R]] = []
                total = 0
                while self._waiting:
                    size = self._waiting[0].size
                    if batch and total + size > self._limit:
                        break
                    pending = self._waiting.popleft()
                    self._waiting_size -= size
                    if pending.cancelled():
                        pending.complete(Unavailable("the caller went away"))
                        continue
                    batch.append(pending)
                    total += size
                if batch:
                    self._under_way += len(batch)
                    try:
                        await self._send(batch)
                    finally:
                        self._under_way -= len(batch)
        finally:
            self._busy -= 1

    async def _send(self, batch: list[Pending[T, R]]) -> None:
        requests = [pending.request for pending in batch]
        try:
            try:
                outcomes = await self._run(requests, False)
            except REFUSED:
                outcomes = await halving(requests, self._attempt, REFUSED, _refusal)
            except PenstockError as error:
                outcomes = (
                    await self._attempt(requests, made=1)
                    if _is_transient(error)
                    else [error] * len(requests)
                )
        except BaseException as error:
            log.exception("a merged call failed")
            failure = Unavailable("an internal error; see the broker's log")
            self._complete(batch, [failure] * len(batch))
            if not isinstance(error, Exception):
                raise
        else:
            if self._waiting:
                # Once the next call is on its way: completing takes as long as a small call.
                asyncio.get_running_loop().call_soon(self._complete, batch, outcomes)
            else:
                self._complete(batch, outcomes)

    async def _attempt(self, requests: list[T], made: int = 0) -> list[R | PenstockError]:
        try:
            return await retrying(lambda again: self._run(requests, again), _is_transient, made)
        except PenstockError as error:
            return [error] * len(requests)

    def _complete(self, batch: list[Pending[T, R]], outcomes: list[R | PenstockError]) -> None:
        for pending, outcome in zip(batch, outcomes, strict=True):
            if self._orphan and pending.done() and not isinstance(outcome, PenstockError):
                self._orphan(outcome)
            else:
                pending.complete(outcome)


def _is_transient(error: PenstockError) -> bool:
    return isinstance(error, Unavailable) and error.retry_after < 1


def _refusal(_: object, error: Exception) -> InvalidRequest:
    log.warning("the database refused a request: %s", error)
    return InvalidRequest("the database refused the data of this request")
