"""Merges concurrent requests of one kind into one database call: group commit across requests.

What limits a queue on PostgreSQL is commits, so requests share them. A request that finds a free
slot is sent at the end of the event loop's turn; those that arrive while all slots are busy wait
together and go out as one call as soon as a slot is free. Under light load nothing waits, under
heavy load calls grow by themselves.

One bad request fails alone: when the database refuses the data of a merged call, the call is split
in halves until the culprit is on its own. A lost connection is tried again while the database as a
whole is up; the kinds merged here are safe to repeat (each says why). What lost a deadlock is
repeated by `Database.fetch`, through which all of them go.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

import asyncpg

from penstock.errors import InvalidRequest, PenstockError, Unavailable

log = logging.getLogger("penstock.queues")

T = TypeVar("T")
R = TypeVar("R")
A = TypeVar("A")
Done = Callable[
    ["asyncio.Future[Any]", R | BaseException], None
]  # told once what became of a request

TRIES = 6


class Merger(Generic[T, R]):
    """`run(requests, again)` answers one result (or exception) per request; `again` is true on a
    repeated try.
    """

    def __init__(
        self,
        run: Callable[[list[T], bool], Awaitable[list[R | PenstockError]]],
        *,
        size: Callable[[T], int],
        limit: int,
        slots: int,
        enough: int = 0,
        orphan: Callable[[R], None] | None = None,
    ) -> None:
        self._run, self._size, self._limit, self._slots, self._orphan = (
            run,
            size,
            limit,
            slots,
            orphan,
        )
        self._waiting: deque[tuple[T, asyncio.Future[Any], Done[R]]] = deque()
        self._busy = 0
        self._enough = (
            enough  # a further call beside the one under way is worth it from this size on
        )
        self._waiting_size = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def put(self, request: T, future: "asyncio.Future[Any]", done: Done[R]) -> None:
        """Have `done(future, outcome)` called once. A request whose future is cancelled before it
        is sent is not.
        """
        self._waiting.append((request, future, done))
        self._waiting_size += self._size(request)
        if self._busy < self._slots and (not self._busy or self._waiting_size >= self._enough):
            self._busy += 1
            task = asyncio.create_task(self._serve())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def submit(self, request: T) -> R:
        """Cancelling the caller does not stop a call that is under way; its result then goes to
        `orphan`.
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self.put(request, future, self._done)
        try:
            return await future
        except asyncio.CancelledError:
            if (
                self._orphan
                and future.done()
                and not future.cancelled()
                and future.exception() is None
            ):
                self._orphan(
                    future.result()
                )  # it was answered in the very turn the caller was cancelled
            raise

    def _done(self, future: "asyncio.Future[R]", outcome: R | BaseException) -> None:
        if not future.done():
            resolve(future, outcome, _same)
        elif self._orphan and not isinstance(outcome, BaseException):
            self._orphan(outcome)

    async def drain(self) -> None:
        """Wait for the calls under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self) -> None:
        try:
            while self._waiting:
                batch: list[tuple[T, asyncio.Future[Any], Done[R]]] = []
                total = 0
                while self._waiting:
                    size = self._size(self._waiting[0][0])
                    if batch and total + size > self._limit:
                        break
                    one = self._waiting.popleft()
                    self._waiting_size -= size
                    if one[1].cancelled():
                        self._fail([one], Unavailable("the caller went away"))
                        continue
                    batch.append(one)
                    total += size
                if batch:
                    await self._send(batch)
        finally:
            self._busy -= 1

    async def _send(
        self, batch: list[tuple[T, asyncio.Future[Any], Done[R]]], again: bool = False
    ) -> None:
        requests = [request for request, _, _ in batch]
        for turn in range(TRIES):
            try:
                results = await self._run(requests, again or turn > 0)
            except Unavailable as error:
                if turn == TRIES - 1 or error.retry_after >= 1:
                    return self._fail(batch, error)
                await asyncio.sleep(min(0.05 * turn, error.retry_after))
            except (
                asyncpg.DataError,
                asyncpg.IntegrityConstraintViolationError,
                asyncpg.ProgramLimitExceededError,
            ) as error:
                if len(batch) == 1:
                    log.warning("the database refused a request: %s", error)
                    return self._fail(
                        batch, InvalidRequest("the database refused the data of this request")
                    )
                middle = len(batch) // 2
                await self._send(batch[:middle], again)
                return await self._send(batch[middle:], again)
            except PenstockError as error:
                return self._fail(batch, error)
            except BaseException as error:
                log.exception("a merged call failed")
                self._fail(batch, Unavailable("an internal error; see the broker's log"))
                if not isinstance(error, Exception):
                    raise
                return None
            else:
                # Once the next call is on its way: what `done` does takes as long as a small call.
                asyncio.get_running_loop().call_soon(_tell_all, batch, results)
                return None
        return None

    def _fail(
        self, batch: list[tuple[T, asyncio.Future[Any], Done[R]]], error: PenstockError
    ) -> None:
        for _, future, done in batch:
            done(future, error)


def _tell_all(
    batch: list[tuple[T, "asyncio.Future[Any]", Done[R]]], results: list[R | PenstockError]
) -> None:
    for (_, future, done), result in zip(batch, results, strict=True):
        done(future, result)


def resolve(
    future: "asyncio.Future[A]", outcome: R | BaseException, answer: Callable[[R], A]
) -> None:
    """Give a future what a request came to, unless it was cancelled."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
        return
    try:
        future.set_result(answer(outcome))
    except Exception as error:  # noqa: BLE001 - a bug of this answer must not reach those of others
        future.set_exception(error)


def tell(work: Coroutine[Any, Any, R], future: "asyncio.Future[Any]", done: Done[R]) -> None:
    """`done(future, outcome)` for what a coroutine comes to."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda task: done(future, task.exception() or task.result()))


def _same(result: R) -> R:
    return result
