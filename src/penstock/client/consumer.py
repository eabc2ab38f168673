"""A consumer: workers that take messages, hand them to a function and acknowledge what it says.

    @client.consumer("orders@billing", concurrency=8, retry=backoff(max_attempts=5))
    async def bill(order: Order) -> None: ...

    await client.run()

Returning means completed. An exception means failed, with its text: the message is tried again and
finally goes to the dead-letter queue, after as many attempts as the queue allows or, with `retry`,
as that says; `Retry` gives it back without counting, `DeadLetter` puts it aside at once, and so
does a payload that is not of the type the function names (`handlers.py`). With `batch` above 1 and
`batches` the function gets the whole list and answers for all of it. A function that is not
async runs in a thread, `concurrency` of them at a time.

With `retry` the attempts are made here: between them the message waits under its lease, beside the
workers and not in one of them. A process that dies leaves it to the next one, which begins to count
again.

Brokers may come and go: a worker waits and goes on. `stop` lets what is being handled finish, as
long as `run` allows; messages that were fetched and not begun, or wait for their next attempt, go
back. A consumer that is cancelled releases what is in progress, too.

The answer to the last message of a batch travels with the next pop (`QueueClient._ack_and_pop`).

A worker may fetch its next batch while the handler works on the one before (`prefetch`): one batch
per worker, under a lease, given back on `stop` without counting an attempt. Where a queue has one
partition that next batch comes only once the one before is answered, so an answer never waits for a
fetch under way: it is then sent by itself. Unless asked otherwise a worker does so while it pays:
the handler takes longer than a fetch, and not so long that others should have the messages.
"""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, TypedDict

from penstock.client.handlers import BoundHandler, Handler, Misfit
from penstock.client.messages import (
    Acked,
    AckStatus,
    Address,
    DeadLetter,
    Message,
    Received,
    Retry,
)
from penstock.client.queues import LONG_POLL_SECONDS, QueueClient, received_late
from penstock.client.tracing import processing
from penstock.errors import AckRefused, Full, InvalidRequest, NotFound, PenstockError, Unavailable
from penstock.io.tasks import cancelled
from penstock.net.retry import Backoff

log = logging.getLogger("penstock.client")

MIN_AHEAD_SECONDS = 0.002  # what a handler must take that fetching ahead is worth a request
MAX_AHEAD_SECONDS = 1.0  # a handler that takes longer leaves the next batch to others
MAX_WAITING = 1000  # messages between two attempts; more fail, and the broker tries them again


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a consumer attempts a message, and how long it waits between attempts."""

    max_attempts: int
    first: float
    factor: float
    longest: float

    def delay(self, attempt: int) -> float:
        """Seconds to wait after this attempt; the first attempt is 1."""
        return float(min(self.longest, self.first * self.factor ** (attempt - 1)))


def backoff(
    max_attempts: int = 5, *, first: float = 1.0, factor: float = 2.0, longest: float = 60.0
) -> RetryPolicy:
    """Retry with exponential backoff: make up to `max_attempts` attempts, wait `first` seconds
    after the first one and `factor` times longer after each further one, at most `longest` seconds.
    After the last attempt the message becomes a dead letter.
    """
    if max_attempts < 1 or first < 0 or factor < 1 or longest < 0:
        raise InvalidRequest(
            "backoff needs 1 or more attempts, a factor of 1 or more, and no negative seconds"
        )
    return RetryPolicy(max_attempts, first, factor, longest)


class ConsumerOptions(TypedDict, total=False):
    """The options of `Client.consumer`."""

    concurrency: int  # calls at the same time; default 1
    batch: int  # messages per fetch; default 1
    batches: bool  # call the function with the whole batch, as a list
    retry: RetryPolicy | None  # such as backoff(5); default: the queue's options decide
    auto_ack: bool  # acknowledge on delivery: at most once
    partitions: int  # the most partitions to take one batch from; default 1
    subscription_mode: str | None  # where a new group starts: "all" or "new"
    subscription_from: datetime | str | None  # where a new group starts: a time, or "now"
    name: str | None  # shown in the Console; default: host and process id
    prefetch: bool | None  # fetch while the function works; None: if it pays
    state: str | None  # the version of the state; the function's last argument is a `State`
    reset_state: bool  # delete the state of another version; default: refuse to start


@dataclass(slots=True)
class Outcome:
    """What became of an attempt."""

    status: AckStatus
    error: str | None = None
    delay: float = 0.0

    def answer(self, worker: str) -> dict[str, str]:
        """As `_ack_each` takes it."""
        about = {} if self.error is None else {"error": self.error, "worker": worker}
        return {"status": self.status} | about


Done = tuple[Message, Outcome]


class Consumer:
    """Fetches messages and calls a function for each. The message is acknowledged when the function
    returns, and counts as failed when it raises. Create it with `Client.consumer` and run it with
    `Client.run`.
    """

    _stateful: ClassVar[bool] = False  # the function gets a `State` as its last argument

    def __init__(  # noqa: PLR0913 public, by keyword
        self,
        client: QueueClient,
        address: str | Address,
        handler: Handler,
        *,
        concurrency: int = 1,
        batch: int = 1,
        batches: bool = False,
        retry: RetryPolicy | None = None,
        auto_ack: bool = False,
        partitions: int = 1,
        subscription_mode: str | None = None,
        subscription_from: datetime | str | None = None,
        name: str | None = None,
        prefetch: bool | None = None,
    ) -> None:
        """`prefetch` fetches the next batch while the function works on the current one: always
        (True), never (False), or (None) while the function takes longer than a fetch and less than
        a second.
        """
        if concurrency < 1 or batch < 1:
            raise InvalidRequest("a consumer needs a concurrency and a batch of at least 1")
        if retry is not None and auto_ack:
            raise InvalidRequest("under auto_ack a message is gone when it is handed out: no retry")
        if prefetch and auto_ack:
            raise InvalidRequest("under auto_ack what is fetched ahead would be lost: no prefetch")
        self.address = Address.parse(address)
        self.name = name or f"{socket.gethostname()}-{os.getpid()}"
        self.concurrency = concurrency
        self.in_flight = 0  # messages the handler has now
        self.handled = 0
        self.failed = 0
        self.released = 0  # messages whose handler had not finished when the consumer had to end
        self.last_error: str | None = None
        self.last_error_at: datetime | None = None
        self.started_at: datetime | None = None
        self._client = client
        self._handler = BoundHandler(handler, batches=batches, stateful=self._stateful)
        self._batches, self._auto_ack, self._retry = batches, auto_ack, retry
        self._prefetch = False if auto_ack else prefetch
        self._options: dict[str, Any] = {  # of every pop
            "wait": LONG_POLL_SECONDS,
            "batch": batch,
            "auto_ack": auto_ack,
            "partitions": partitions,
            "subscription_mode": subscription_mode,
            "subscription_from": subscription_from,
        }
        self._threads: ThreadPoolExecutor | None = None
        self._stopping = asyncio.Event()
        self._slots = asyncio.Semaphore(concurrency)  # of the handler, for workers and retries
        self._workers: list[asyncio.Task[None]] = []
        self._polls: set[asyncio.Future[list[Message]]] = set()
        # messages between two attempts, with the task that makes the next one
        self._waiting: dict[asyncio.Task[None], Sequence[Message]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Call the decorated function directly."""
        return self._handler.function(*arguments)

    @property
    def waiting(self) -> int:
        """The number of messages that wait for their next attempt."""
        return sum(map(len, self._waiting.values()))

    async def run(self, drain_seconds: float | None = None) -> None:
        """Consume until `stop` is called. Then messages in progress have `drain_seconds` to finish
        (None: as long as they take); those that do not finish are released. Raises an error that a
        retry cannot fix, such as a request that the broker rejects.
        """
        if self._handler.threaded:  # not the loop's own: it has few threads, and others use them
            self._threads = ThreadPoolExecutor(self.concurrency, "penstock-consumer")
        self.started_at = datetime.now(UTC)
        self._workers = [asyncio.create_task(self._work()) for _ in range(self.concurrency)]
        working = asyncio.ensure_future(self._work_to_the_end())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((working,), timeout=drain_seconds)
            if working.done():
                working.result()
        finally:
            await cancelled(working, stopping, *self._workers, *self._waiting)
            if self._threads:
                self._threads.shutdown(wait=False)

    async def _work_to_the_end(self) -> None:
        await asyncio.gather(*self._workers)
        await asyncio.gather(*self._waiting)

    async def ended(self, but: asyncio.Task[Any] | None) -> None:
        """Wait until the consumer's tasks have ended, except the task `but`."""
        others = [task for task in (*self._workers, *self._waiting) if task is not but]
        if others:
            await asyncio.wait(others)

    def stop(self) -> None:
        """Stop fetching, and end when the messages in progress are done."""
        self._stopping.set()
        for poll in self._polls:
            poll.cancel()

    async def _work(self) -> None:
        pauses = Backoff(0.1, 5.0)
        clock = asyncio.get_running_loop().time
        last: Done | None = None  # done, and its answer not sent yet
        poll: asyncio.Future[list[Message]] | None = None  # a fetch under way
        carried: Done | None = None  # the answer that travels with it
        pays = self._prefetch is True
        try:
            while not self._stopping.is_set():
                asked = clock()
                ahead = poll is not None
                if poll is None:
                    poll, carried, last = self._poll(last), last, None
                try:
                    messages = await self._fetch(poll, carried)
                    pauses.reset()
                except (Unavailable, Full, NotFound) as error:
                    for done in (carried, last):
                        await self._answer_done(done)
                    poll = carried = last = None
                    pause = pauses.delay()
                    log.warning("%s: %s; trying again in %.1f s", self.address, error, pause)
                    await self._pause(pause)
                    continue
                poll = carried = None
                began = clock()
                if pays and messages and not self._stopping.is_set():
                    poll, carried, last = self._poll(last), last, None
                elif messages:
                    await self._answer_done(last)
                    last = None
                if messages:
                    last = await self._handle_all(messages)
                    took = clock() - began
                    if self._prefetch is None:
                        # nothing to wait for: it came in time, or would have
                        in_time = (
                            not ahead and began - asked < took if poll is None else poll.done()
                        )
                        pays = in_time and MIN_AHEAD_SECONDS < took < MAX_AHEAD_SECONDS
                if poll is not None and not poll.done():
                    await self._answer_done(last)  # it may wait for this very answer
                    last = None
            await self._answer_done(last)
        finally:
            if poll is not None:
                await asyncio.shield(self._give_up(poll, carried))

    async def _handle_all(self, messages: list[Message]) -> Done | None:
        """Hand out a batch; what is not begun when the consumer stops goes back."""
        begun = 0
        last = None
        try:
            if self._batches:
                begun = len(messages)
                return await self._handle(messages, hold_answer=len(messages) == 1)
            for message in messages:
                if self._stopping.is_set():
                    break
                begun += 1
                last = await self._handle([message], hold_answer=begun == len(messages))
            return last
        finally:
            if begun < len(messages) and not self._auto_ack:
                await self._release(messages[begun:])

    def _poll(self, last: Done | None) -> "asyncio.Future[list[Message]]":
        """Ask for the next messages, with the answer to the one before them."""
        if last is None:
            asked = self._client.pop(self.address, retry_for=0.0, **self._options)
        else:
            asked = self._client._ack_and_pop(
                self.address,
                [(last[0], last[1].answer(self.name))],
                self._note_acked,
                **self._options,
            )
        return asyncio.ensure_future(asked)

    async def _fetch(
        self, poll: "asyncio.Future[list[Message]]", last: Done | None
    ) -> list[Message]:
        """What a poll brings. When its answer, `last`, does not come through the caller answers
        again, which changes nothing if it was done.
        """
        self._polls.add(poll)
        try:
            return await poll
        except asyncio.CancelledError:
            poll.cancel()
            if self._stopping.is_set() and not _being_cancelled():
                await self._answer_done(last)  # our own stop, not someone who cancels the worker
                return []
            raise
        finally:
            self._polls.discard(poll)

    async def _give_up(self, poll: "asyncio.Future[list[Message]]", last: Done | None) -> None:
        """End a fetch that nobody waits for; what it brought goes back."""
        messages = await received_late(poll)
        if messages:
            await self._client._give_back(messages)
        else:
            await self._answer_done(last)

    async def _pause(self, seconds: float) -> bool:
        """Wait; True when it was cut short by `stop`."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    # Handling

    async def _handle(
        self, messages: Sequence[Message], attempt: int = 1, *, hold_answer: bool = False
    ) -> Done | None:
        """Make an attempt and answer for it; the message and its outcome when the answer is left to
        the caller.
        """
        fitting, payloads = await self._decoded(messages)
        if not fitting:
            return None
        async with self._released_if_cancelled(fitting), self._slots:
            outcome = await self._attempt(payloads, fitting)
        if outcome.status == "failed" and self._retry is not None:
            if attempt >= self._retry.max_attempts:
                outcome = Outcome("dlq", f"{attempt} attempts failed: {outcome.error}")
            elif len(self._waiting) < MAX_WAITING:
                self._try_again(fitting, attempt, self._retry.delay(attempt))
                return None
        if hold_answer and len(fitting) == 1 and not outcome.delay and not self._auto_ack:
            return fitting[0], outcome
        await self._answer(fitting, outcome)
        return None

    async def _decoded(self, messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
        """The messages whose payload is what the handler asks for, and their payloads. The others
        become dead letters.
        """
        fitting: list[Message] = []
        payloads: list[Any] = []
        for message in messages:
            try:
                payloads.append(self._handler.payload(message))
                fitting.append(message)
            except Misfit as misfit:
                await self._answer([message], self._noted(Outcome("dlq", str(misfit)), 1))
        return fitting, payloads

    @asynccontextmanager
    async def _released_if_cancelled(self, messages: Sequence[Message]) -> AsyncIterator[None]:
        """Release the messages when what is done with them is cancelled: others can take them now,
        and not only when their lease ends."""
        try:
            yield
        except asyncio.CancelledError:
            self.released += len(messages)
            if not self._auto_ack:
                await self._release(messages)
            raise

    async def _release(self, messages: Sequence[Message]) -> None:
        """Return the messages to the queue, even if the caller is cancelled meanwhile."""
        releasing = asyncio.ensure_future(self._client._give_back(messages))
        try:
            await asyncio.shield(releasing)
        except asyncio.CancelledError:
            await releasing
            raise

    async def _attempt(
        self, payloads: Sequence[Any], messages: Sequence[Message], *more: Any
    ) -> Outcome:
        self.in_flight += len(messages)
        try:
            with processing(*messages):
                await self._handler.call(payloads, messages, self._threads, *more)
            outcome = Outcome("completed")
        except Retry as again:
            outcome = Outcome("retry", str(again) or None, again.delay)
        except DeadLetter as failure:
            outcome = Outcome("dlq", str(failure) or "put aside by the consumer")
        except (
            Exception,
            asyncio.CancelledError,
        ) as failure:  # whatever the user's code raises: an attempt that failed
            if isinstance(failure, asyncio.CancelledError) and _being_cancelled():
                raise  # not the handler's own: somebody cancels us
            outcome = Outcome("failed", f"{type(failure).__name__}: {failure}")
            log.exception("%s: the handler failed", self.address)
        finally:
            self.in_flight -= len(messages)
        return self._noted(outcome, len(messages))

    def _noted(self, outcome: Outcome, count: int) -> Outcome:
        if outcome.status == "completed":
            self.handled += count
        else:
            self.failed += count
        if outcome.status in ("failed", "dlq"):
            self.last_error, self.last_error_at = outcome.error, datetime.now(UTC)
        return outcome

    def _try_again(self, messages: Sequence[Message], attempt: int, delay: float) -> None:
        async def wait() -> None:
            async with self._released_if_cancelled(messages):
                stopped = await self._pause(delay)
                if stopped:  # a fetch that has not ended yet would take the messages again
                    await asyncio.wait(self._workers)
            if stopped:
                await self._release(messages)
            else:
                await self._handle(messages, attempt + 1)

        task = asyncio.create_task(wait(), name=f"retry of {self.address}")
        self._waiting[task] = messages
        task.add_done_callback(lambda task: self._waiting.pop(task, None))

    async def _answer_done(self, done: Done | None) -> None:
        if done is not None:
            await self._answer([done[0]], done[1])

    async def _answer(self, messages: Sequence[Received], outcome: Outcome) -> None:
        if self._auto_ack:
            return
        try:
            if outcome.delay:
                await self._client.ack(messages, outcome.status, delay=outcome.delay)
            else:
                answer = outcome.answer(self.name)
                await self._client._ack_each([(message, answer) for message in messages])
        except AckRefused as refused:
            log.warning("%s: %s", self.address, refused)
        except PenstockError as failure:
            log.warning(
                "%s: messages could not be acknowledged and will come again: %s",
                self.address,
                failure,
            )

    def _note_acked(self, acked: Sequence[Acked]) -> None:
        for one in acked:
            if not one.success:
                log.warning("%s: an ack was refused: %s", self.address, one.error)


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
