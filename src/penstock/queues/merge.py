"""Merges concurrent requests of one kind into one database call: group commit across requests.

What limits a queue on PostgreSQL is commits, so requests share them. A request that finds a free slot is sent at the
end of the event loop's turn; those that arrive while all slots are busy wait together and go out as one call as soon as
a slot is free. Under light load nothing waits, under heavy load calls grow by themselves.

One bad request fails alone: when the database refuses the data of a merged call, the call is split in halves until the
culprit is on its own. A lost connection is tried again while the database as a whole is up; the kinds merged here are
safe to repeat (each says why).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import asyncpg

from penstock.errors import InvalidRequest, PenstockError, Unavailable

log = logging.getLogger("penstock.queues")

T = TypeVar("T")
R = TypeVar("R")

AGAIN = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)  # rolled back as a whole: safe to run again
TRIES = 6


class Merger(Generic[T, R]):
    """`run(requests, again)` answers one result (or exception) per request; `again` is true on a repeated try."""

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
        self._run, self._size, self._limit, self._slots, self._orphan = run, size, limit, slots, orphan
        self._waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._busy = 0
        self._enough = enough  # a further call beside the one under way is worth it from this size on
        self._waiting_size = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def submit(self, request: T) -> R:
        """Cancelling the caller does not stop a call that is under way; its result then goes to `orphan`."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._waiting_size += self._size(request)
        if self._busy < self._slots and (not self._busy or self._waiting_size >= self._enough):
            self._busy += 1
            task = asyncio.create_task(self._serve())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            return await future
        except asyncio.CancelledError:
            if self._orphan and future.done() and not future.cancelled() and future.exception() is None:
                self._orphan(future.result())  # it was answered in the very turn the caller was cancelled
            raise

    async def drain(self) -> None:
        """Wait for the calls under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self) -> None:
        try:
            while self._waiting:
                batch: list[tuple[T, asyncio.Future[R]]] = []
                total = 0
                while self._waiting:
                    request, future = self._waiting[0]
                    size = self._size(request)
                    if future.cancelled():
                        self._waiting.popleft()
                        self._waiting_size -= size
                        continue
                    if batch and total + size > self._limit:
                        break
                    batch.append(self._waiting.popleft())
                    self._waiting_size -= size
                    total += size
                if batch:
                    await self._send(batch)
        finally:
            self._busy -= 1

    async def _send(self, batch: list[tuple[T, asyncio.Future[R]]], again: bool = False) -> None:
        requests = [request for request, _ in batch]
        for turn in range(TRIES):
            try:
                results = await self._run(requests, again or turn > 0)
            except (*AGAIN, Unavailable) as error:
                if turn == TRIES - 1 or (isinstance(error, Unavailable) and error.retry_after >= 1):
                    failed = error if isinstance(error, Unavailable) else Unavailable("the database is too busy")
                    return self._fail(batch, failed)
                await asyncio.sleep(min(0.05 * turn, error.retry_after if isinstance(error, Unavailable) else 1))
            except (
                asyncpg.DataError,
                asyncpg.IntegrityConstraintViolationError,
                asyncpg.ProgramLimitExceededError,
            ) as error:
                if len(batch) == 1:
                    log.warning("the database refused a request: %s", error)
                    return self._fail(batch, InvalidRequest("the database refused the data of this request"))
                middle = len(batch) // 2
                await self._send(batch[:middle], again)
                return await self._send(batch[middle:], again)
            except PenstockError as error:
                return self._fail(batch, error)
            except asyncpg.QueryCanceledError:
                return self._fail(batch, Unavailable("the database took too long"))
            except BaseException as error:
                log.exception("a merged call failed")
                self._fail(batch, Unavailable("an internal error; see the broker's log"))
                if not isinstance(error, Exception):
                    raise
                return None
            else:
                for (_, future), result in zip(batch, results, strict=True):
                    if not future.done():
                        if isinstance(result, PenstockError):
                            future.set_exception(result)
                        else:
                            future.set_result(result)
                    elif self._orphan and not isinstance(result, PenstockError):
                        self._orphan(result)
                return None
        return None

    def _fail(self, batch: list[tuple[T, asyncio.Future[R]]], error: PenstockError) -> None:
        for _, future in batch:
            if not future.done():
                future.set_exception(error)
