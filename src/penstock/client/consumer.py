"""A consumer: workers that take messages, call a function for each, and send its outcome.

    @client.consumer("orders@billing", concurrency=8, retry=backoff(max_attempts=5))
    async def bill(order: Order) -> None: ...

    await client.run()

Returning means completed. An exception means failed, with its text and traceback: the broker
delivers the message again and finally moves it to the dead letters, after as many attempts as the
queue allows or, with `retry`, as that says. The broker counts the attempts, so they survive the
process. `Retry` returns the message without counting, `DeadLetter` moves it to the dead letters at
once, and so does a payload that is not of the type the function names (`handlers.py`). With
`batches` the function gets the whole list and answers for all of it. A function that is not async
runs in a thread, `concurrency` of them at a time.

Brokers may come and go: a worker waits and tries again. `stop` lets messages in progress finish, as
long as `run` allows; messages that were fetched and not begun are released. A consumer that is
cancelled releases what is in progress, too.

The answer to the last message of a batch travels with the next pop (`QueueClient._ack_and_pop`).

A worker may fetch its next batch while the handler works on the one before (`prefetch`): one batch
per worker, under a lease, released on `stop` without counting an attempt. Where a queue has one
partition, that next batch comes only once the one before is answered, so an answer never waits for
a fetch under way: it is then sent by itself. By default a worker prefetches while it pays: the
handler takes longer than a fetch, and not so long that others should have the messages.
"""

import asyncio
import functools
import logging
import os
import socket
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, thread
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar, Unpack

from penstock.client.handlers import BoundHandler, Hook, Misfit
from penstock.client.items import TakeOptions, check_names
from penstock.client.messages import AckStatus, Address, DeadLetter, Message, Received, Retry
from penstock.client.policies import EXITS, RateLimit, RetryPolicy
from penstock.client.queues import LONG_POLL_SECONDS, Answer, QueueClient, received_late
from penstock.client.tracing import processing
from penstock.contract.deliveries import Acked
from penstock.errors import AckRefused, Full, InvalidRequest, NotFound, PenstockError, Unavailable
from penstock.io.tasks import cancelled
from penstock.net.retry import Backoff

log = logging.getLogger("penstock.client")

MIN_AHEAD_SECONDS = 0.002  # what a handler must take that fetching ahead is worth a request
MAX_AHEAD_SECONDS = 1.0  # a handler that takes longer leaves the next batch to others
MAX_TRACEBACK_CHARS = 4000  # kept with a dead letter: the end, where the error is
OUR_FRAMES = (str(Path(__file__).parent), str(Path(thread.__file__).parent))
P = ParamSpec("P")
R = TypeVar("R")


class ConsumerOptions(TakeOptions, total=False):
    """The options of `Client.consumer`."""

    concurrency: int  # calls at the same time; default 1
    batches: bool  # call the function with the whole batch, as a list
    timeout: float | None  # seconds that a call may take before it has failed; default: any time
    retry: RetryPolicy | None  # such as backoff(5); default: the queue's options decide
    rate: str | None  # the most messages this consumer begins, such as "100/s" or "30/min"
    group_rate: str | None  # the most messages that all consumers of the group begin together
    tracebacks: bool  # keep the traceback with a failure; default True
    name: str | None  # shown in the Console; default: host and process id
    prefetch: bool | None  # fetch while the function works; None: if it pays
    state: str | None  # the version of the state; the function's last argument is a `State`
    reset_state: bool  # delete the state of another version; default: refuse to start


@dataclass(slots=True)
class Outcome:
    """The outcome of an attempt."""

    status: AckStatus
    error: str | None = None
    delay: float = 0.0
    max_attempts: int | None = None  # None: as the queue says

    def answer(self, worker: str) -> Answer:
        """Return the outcome in the form that `_ack_each` takes."""
        answer: Answer = {"status": self.status}
        if self.error is not None:
            answer |= {"error": self.error, "worker": worker}
        if self.delay:
            answer["delay"] = self.delay
        if self.max_attempts is not None:
            answer["maxAttempts"] = self.max_attempts
        return answer


Done = tuple[Message, Outcome]


class Consumer(Generic[P, R]):
    """Fetches messages and calls a function for each. The message is acknowledged when the function
    returns, and counts as failed when it raises. Create it with `Client.consumer` and run it with
    `Client.run`. Calling it calls the function.
    """

    _stateful: ClassVar[bool] = False  # the function gets a `State` as its last argument

    def __init__(  # noqa: PLR0913 public, by keyword
        self,
        client: QueueClient,
        address: str | Address,
        handler: Callable[P, R],
        *,
        concurrency: int = 1,
        batches: bool = False,
        timeout: float | None = None,
        retry: RetryPolicy | None = None,
        rate: str | None = None,
        group_rate: str | None = None,
        tracebacks: bool = True,
        name: str | None = None,
        prefetch: bool | None = None,
        **fetching: Unpack[TakeOptions],
    ) -> None:
        """`prefetch` fetches the next batch while the function works on the current one: always
        (True), never (False), or (None) while the function takes longer than a fetch and less than
        a second.
        """
        check_names(fetching, TakeOptions)
        batch, auto_ack = fetching.get("batch", 1), fetching.get("auto_ack", False)
        if concurrency < 1 or batch < 1:
            raise InvalidRequest("a consumer needs a concurrency and a batch of at least 1")
        if retry is not None and auto_ack:
            raise InvalidRequest(
                "auto_ack acknowledges messages on delivery: retry= is not possible"
            )
        if prefetch and auto_ack:
            raise InvalidRequest(
                "auto_ack acknowledges messages on delivery: prefetch would lose some"
            )
        if timeout is not None and timeout <= 0:
            raise InvalidRequest(f"a timeout is more than 0 seconds, not {timeout:g}")
        if rate is not None and group_rate is not None:
            raise InvalidRequest("a consumer has a rate or a group_rate, not both")
        self.address = Address.parse(address)
        self.name = name or f"{socket.gethostname()}-{os.getpid()}"
        self.concurrency = concurrency
        self.handled = 0
        self.failed = 0
        self.most_calls = 0  # the most calls that ran at the same time
        self.released = 0  # messages whose handler had not finished when the consumer had to end
        self.hanging = 0  # threads whose function did not end within its timeout
        self.on_hang: Callable[[], object] | None = None  # instead of ending when all hang
        self.last_error: str | None = None
        self.last_error_at: datetime | None = None
        self.started_at: datetime | None = None
        self.hooks: list[Hook] = []  # run around each call; the first one is the outermost
        self._client = client
        self._handler = BoundHandler(handler, batches=batches, stateful=self._stateful)
        self._batches, self._auto_ack, self._retry = batches, auto_ack, retry
        self.timeout, self._tracebacks = timeout, tracebacks
        limit = rate or group_rate
        self._rate = RateLimit.parse(limit) if limit is not None else None
        # its share depends on how many consumers the group has, which `HealthReporter` asks for
        self.shared_rate = self._rate if group_rate is not None else None
        self._prefetch = False if auto_ack else prefetch
        self._batch, self._fetching = batch, fetching
        self._threads: ThreadPoolExecutor | None = None
        self._stopping = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._polls: set[asyncio.Future[list[Message]]] = set()
        self._calls: dict[
            object, tuple[float, int]
        ] = {}  # running calls: start time and number of messages
        functools.update_wrapper(self, handler)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the decorated function directly."""
        result: R = self._handler.function(*args, **kwargs)
        return result

    @property
    def in_flight(self) -> int:
        """The number of messages that the function has now."""
        return sum(count for _, count in self._calls.values())

    @property
    def in_flight_seconds(self) -> float:
        """The seconds that the oldest call has been running; 0 without calls."""
        if not self._calls:
            return 0.0
        loop = asyncio.get_running_loop()
        return loop.time() - min(since for since, _ in self._calls.values())

    async def run(self, drain_seconds: float | None = None) -> None:
        """Consume until `stop` is called. Then messages in progress have `drain_seconds` to finish
        (None: as long as they take); those that do not finish are released. Raises an error that a
        retry cannot fix, such as a request that the broker rejects.
        """
        if (
            self._handler.threaded
        ):  # not the loop's own executor: it has few threads, and other code uses them
            # hanging threads are replaced, up to the number that may run
            self._threads = ThreadPoolExecutor(2 * self.concurrency, "penstock-consumer")
        self.started_at = datetime.now(UTC)
        log.info(
            "ready: %s, concurrency %d, batch %d, prefetch %s",
            self.address,
            self.concurrency,
            self._batch,
            {True: "on", False: "off", None: "while it pays"}[self._prefetch],
            extra=self._extra(),
        )
        self._workers = [asyncio.create_task(self._work()) for _ in range(self.concurrency)]
        working = asyncio.ensure_future(self._work_to_the_end())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((working,), timeout=drain_seconds)
            if working.done():
                working.result()
        finally:
            await cancelled(working, stopping, *self._workers)
            if self._threads:
                self._threads.shutdown(wait=False)

    async def _work_to_the_end(self) -> None:
        await asyncio.gather(*self._workers)

    async def ended(self, but: asyncio.Task[Any] | None) -> None:
        """Wait until the consumer's tasks have ended, except the task `but`."""
        others = [task for task in self._workers if task is not but]
        if others:
            await asyncio.wait(others)

    def stop(self) -> None:
        """Stop fetching, and end when the messages in progress are done."""
        if self._workers and not self._stopping.is_set():
            log.info(
                "stopping: %s, %d in progress", self.address, self.in_flight, extra=self._extra()
            )
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
                    self._client.outage.end()
                except (Unavailable, Full, NotFound) as error:
                    self._client.outage.note(error)
                    await self._answer_done(carried, repeated=True)
                    await self._answer_done(last)
                    poll = carried = last = None
                    await self._pause(pauses.delay())
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
                        # do not wait: the answer has arrived
                        in_time = (
                            not ahead and began - asked < took if poll is None else poll.done()
                        )
                        pays = in_time and MIN_AHEAD_SECONDS < took < MAX_AHEAD_SECONDS
                if poll is not None and not poll.done():
                    await self._answer_done(last)  # the caller may wait for this answer
                    last = None
            await self._answer_done(last)
        finally:
            if poll is not None:
                await asyncio.shield(self._give_up(poll, carried))

    async def _handle_all(self, messages: list[Message]) -> Done | None:
        """Handle a batch. Messages not started when the consumer stops are released."""
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
        """Request the next messages, and send the outcome of the previous one with it."""
        if last is None:
            asked = self._client.pop(
                self.address, wait=LONG_POLL_SECONDS, retry_for=0.0, **self._fetching
            )
        else:
            asked = self._client._ack_and_pop(
                self.address,
                [(last[0], last[1].answer(self.name))],
                self._note_acked,
                wait=LONG_POLL_SECONDS,
                **self._fetching,
            )
        return asyncio.ensure_future(asked)

    async def _fetch(
        self, poll: "asyncio.Future[list[Message]]", last: Done | None
    ) -> list[Message]:
        """Return what a poll brings. If the answer that travels with it, `last`, does not get
        through, the caller answers again, which changes nothing if it was done.
        """
        self._polls.add(poll)
        try:
            return await poll
        except asyncio.CancelledError:
            poll.cancel()
            if self._stopping.is_set() and not _being_cancelled():
                # our own stop: the worker is not being cancelled
                await self._answer_done(last, repeated=True)
                return []
            raise
        finally:
            self._polls.discard(poll)

    async def _give_up(self, poll: "asyncio.Future[list[Message]]", last: Done | None) -> None:
        """Cancel a fetch, and release the messages it brought."""
        messages = await received_late(poll)
        if messages:
            await self._client._give_back(messages)
        else:
            await self._answer_done(last, repeated=True)

    async def _pause(self, seconds: float) -> None:
        """Wait, at most until `stop`."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    # Handling

    async def _handle(
        self, messages: Sequence[Message], *, hold_answer: bool = False
    ) -> Done | None:
        """Make an attempt and answer for it. Returns the message and its outcome if the answer is
        left to the caller.
        """
        fitting, payloads = await self._decoded(messages)
        if not fitting:
            return None
        async with self._released_if_cancelled(fitting):
            outcome = await self._attempt(payloads, fitting)
        if hold_answer and len(fitting) == 1 and not self._auto_ack:
            return fitting[0], outcome
        await self._answer(fitting, outcome)
        return None

    async def _decoded(self, messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
        """Return the messages whose payload is what the handler asks for, and their payloads. The
        others become dead letters.
        """
        fitting: list[Message] = []
        payloads: list[Any] = []
        for message in messages:
            try:
                payloads.append(self._handler.payload(message))
                fitting.append(message)
            except Misfit as misfit:
                outcome = self._noted(Outcome("dlq", str(misfit)), [message], misfit)
                await self._answer([message], outcome)
        return fitting, payloads

    @asynccontextmanager
    async def _released_if_cancelled(self, messages: Sequence[Message]) -> AsyncIterator[None]:
        """Release the messages when the work on them is cancelled: others can take them now, and
        not only when their lease ends.
        """
        try:
            yield
        except asyncio.CancelledError:
            self.released += len(messages)
            if not self._auto_ack:
                await self._release(messages)
            raise

    async def _release(self, messages: Sequence[Message]) -> None:
        """Return the messages to the queue, even if the caller is cancelled."""
        releasing = asyncio.ensure_future(self._client._give_back(messages))
        try:
            await asyncio.shield(releasing)
        except asyncio.CancelledError:
            await releasing
            raise

    async def _attempt(
        self, payloads: Sequence[Any], messages: Sequence[Message], *more: Any
    ) -> Outcome:
        if self._rate is not None:
            await self._rate.take(len(messages))
        if self._retry is not None:
            for message in messages:
                message.max_attempts = self._retry.max_attempts
        failure: BaseException | None = None
        call = object()
        self._calls[call] = asyncio.get_running_loop().time(), len(messages)
        self.most_calls = max(self.most_calls, len(self._calls))
        try:
            async with AsyncExitStack() as stack:
                for hook in self.hooks:
                    await stack.enter_async_context(hook(messages))
                with processing(*messages):
                    await self._call(payloads, messages, *more)
            outcome = Outcome("completed")
        except Retry as again:
            outcome, failure = Outcome("retry", str(again) or None, again.delay), again
        except DeadLetter as error:
            outcome, failure = Outcome("dlq", str(error) or "put aside by the consumer"), error
        except (Exception, *EXITS) as error:  # any exception of the user's code is a failure
            if isinstance(error, asyncio.CancelledError) and _being_cancelled():
                raise  # not raised by the handler: we are cancelled
            outcome, failure = self._failed(error, messages[0].attempt), error
        finally:
            del self._calls[call]
        return self._noted(outcome, messages, failure)

    async def _call(self, payloads: Sequence[Any], messages: Sequence[Message], *more: Any) -> None:
        """Call the function, for at most its timeout."""
        try:
            async with asyncio.timeout(self.timeout) as limit:
                await self._handler.call(payloads, messages, self._threads, *more)
        except TimeoutError as cut:
            if not limit.expired():
                raise  # the function's own
            if self._threads is not None:
                self._note_hanging()
            error = TimeoutError(f"the handler did not end within {self.timeout:g} s")
            cause = cut.__cause__ or cut  # its traceback leads to where the function was
            raise error.with_traceback(cause.__traceback__) from None

    def _note_hanging(self) -> None:
        """Count a thread that hangs: it cannot be stopped from outside. End the consumer when as
        many hang as may run, unless `on_hang` takes care of it.
        """
        self.hanging += 1
        log.error(
            "%s: the call still runs in a thread, which cannot be stopped (%d of %d hang)",
            self.address,
            self.hanging,
            self.concurrency,
            extra=self._extra(),
        )
        if self.on_hang is not None:
            self.on_hang()
        elif self.hanging >= self.concurrency:
            self.stop()

    def _failed(self, error: BaseException, attempt: int) -> Outcome:
        text = f"{type(error).__name__}: {error}"
        if self._tracebacks and (frames := _traceback(error)):
            text += f"\n\n{frames[-MAX_TRACEBACK_CHARS:]}"
        if self._retry is None:
            return Outcome("failed", text)
        if not self._retry.retries(error):
            return Outcome("dlq", text)
        return Outcome("failed", text, self._retry.delay(attempt), self._retry.max_attempts)

    def _noted(
        self, outcome: Outcome, messages: Sequence[Message], failure: BaseException | None
    ) -> Outcome:
        """Count the outcome, and log a failure in one line."""
        if failure is None:
            self.handled += len(messages)
            return outcome
        self.failed += len(messages)
        first = messages[0]
        reason = f"{type(failure).__name__}: {failure}"
        if outcome.status in ("failed", "dlq"):
            self.last_error, self.last_error_at = reason, datetime.now(UTC)
        final = outcome.status == "dlq" or (
            outcome.status == "failed" and 0 < first.max_attempts <= first.attempt
        )
        delay = outcome.delay
        if outcome.status == "failed" and self._retry is None:
            delay = first.retry_delay or 0.0
        following = "no further attempt" if final else f"next attempt in {delay:.1f} s"
        log.log(
            logging.INFO if outcome.status == "retry" else logging.WARNING,
            "%s: %s in partition %s%s, attempt %d%s: %s; %s",
            self.address,
            first.transaction_id,
            first.partition,
            f" and {len(messages) - 1} more" if len(messages) > 1 else "",
            first.attempt,
            f" of {first.max_attempts}" if first.max_attempts else "",
            " ".join(reason.split()),
            following,
            exc_info=failure if log.isEnabledFor(logging.DEBUG) else None,
            extra=self._extra()
            | {
                "partition": first.partition,
                "transaction_id": first.transaction_id,
                "message_id": first.id,
                "attempt": first.attempt,
                "max_attempts": first.max_attempts,
                "outcome": "dlq" if final else outcome.status,
                "next_attempt_seconds": None if final else delay,
                "error": reason,
            },
        )
        return outcome

    def _extra(self) -> dict[str, Any]:
        """Return the extra fields of a log line."""
        return {"queue": self.address.queue, "group": self.address.group, "consumer": self.name}

    async def _answer_done(self, done: Done | None, *, repeated: bool = False) -> None:
        if done is not None:
            await self._answer([done[0]], done[1], repeated=repeated)

    async def _answer(
        self, messages: Sequence[Received], outcome: Outcome, *, repeated: bool = False
    ) -> None:
        """Acknowledge messages. If this is `repeated`, because no answer came to the first attempt,
        a refusal is not a warning: the broker refuses it if it took the first one.
        """
        if self._auto_ack:
            return
        answer = outcome.answer(self.name)
        try:
            await self._client._ack_each([(message, answer) for message in messages])
        except AckRefused as refused:
            level = logging.DEBUG if repeated else logging.WARNING
            log.log(level, "%s: %s", self.address, refused, extra=self._extra())
        except PenstockError as failure:
            log.warning(
                "%s: messages could not be acknowledged and will be delivered again: %s",
                self.address,
                failure,
                extra=self._extra(),
            )

    def _note_acked(self, acked: Sequence[Acked]) -> None:
        for one in acked:
            if not one.success:
                log.warning(
                    "%s: an ack was refused: %s", self.address, one.error, extra=self._extra()
                )


def _traceback(error: BaseException) -> str:
    """Return the traceback, without the frames that lead to the user's function; empty if there
    are no others.
    """
    about = traceback.TracebackException.from_exception(error)
    for place, frame in enumerate(about.stack):
        if not frame.filename.startswith(OUR_FRAMES):
            del about.stack[:place]
            return "".join(about.format()).rstrip()
    return ""


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
