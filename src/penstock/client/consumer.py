"""A consumer: workers that take messages, hand them to a function and acknowledge what it says.

    @client.consumer("orders@billing", concurrency=8)
    async def bill(message): ...

    await client.run()

Returning means completed. An exception means failed, with its text: the message is tried again and
finally goes to the dead-letter queue; `Retry` gives it back without counting, `DeadLetter` puts it
aside at once. With `batch` above 1 and `each=False` the function gets the whole list and answers
for all of it. A function that is not async runs in a thread, `concurrency` of them at a time.

Brokers may come and go: a worker waits and goes on. `stop` lets what is being handled finish;
messages that were fetched and not begun go back.
"""

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, TypedDict

from penstock.client.messages import AckRefused, AckStatus, Address, DeadLetter, Message, Retry
from penstock.client.queues import LONG_POLL, QueueClient
from penstock.errors import Full, InvalidRequest, NotFound, PenstockError, Unavailable
from penstock.net.retry import Backoff

log = logging.getLogger("penstock.client")

Handler = Callable[[Any], Any]


class ConsumerOptions(TypedDict, total=False):
    """The options of a consumer, as `Consumer` takes them."""

    concurrency: int
    batch: int
    each: bool
    auto_ack: bool
    partitions: int
    subscription_mode: str | None
    subscription_from: datetime | str | None


class Consumer:
    """Takes messages, calls a handler for each, acknowledges it when the handler returns and
    fails it when the handler raises. Made by `Client.consumer`, run by `Client.run`.
    """

    def __init__(
        self,
        client: QueueClient,
        address: str | Address,
        handler: Handler,
        *,
        concurrency: int = 1,
        batch: int = 1,
        each: bool = True,
        auto_ack: bool = False,
        partitions: int = 1,
        subscription_mode: str | None = None,
        subscription_from: datetime | str | None = None,
    ) -> None:
        if concurrency < 1 or batch < 1:
            raise InvalidRequest("a consumer needs a concurrency and a batch of at least 1")
        self.address = Address.parse(address)
        self.handled = 0
        self.failed = 0
        self._client = client
        self._handler = handler
        self._threaded = not inspect.iscoroutinefunction(handler)
        self._concurrency, self._each, self._auto_ack = concurrency, each, auto_ack
        self._options: dict[str, Any] = {
            "batch": batch,
            "auto_ack": auto_ack,
            "partitions": partitions,
            "subscription_mode": subscription_mode,
            "subscription_from": subscription_from,
        }
        self._threads: ThreadPoolExecutor | None = None
        self._stopping = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._polls: set[asyncio.Task[list[Message]]] = set()

    def __call__(self, message: Any) -> Any:
        """The function itself, as if it had not been decorated."""
        return self._handler(message)

    async def run(self) -> None:
        """Consume until `stop`; raises what no retry can help (a request the broker refuses for
        good).
        """
        if self._threaded:  # not the loop's own: it has few threads, and others use them
            self._threads = ThreadPoolExecutor(self._concurrency, "penstock-consumer")
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._concurrency)]
        try:
            await asyncio.gather(*self._workers)
        finally:
            for worker in self._workers:
                worker.cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)
            if self._threads:
                self._threads.shutdown(wait=False)

    async def ended(self, but: asyncio.Task[Any] | None) -> None:
        """Wait for the workers to end, if it runs; `but` for the one that asks, if it is one."""
        others = [worker for worker in self._workers if worker is not but]
        if others:
            await asyncio.wait(others)

    def stop(self) -> None:
        """Fetch nothing more and end once what is being handled is done."""
        self._stopping.set()
        for poll in self._polls:
            poll.cancel()

    async def _work(self) -> None:
        backoff = Backoff(0.1, 5.0)
        while not self._stopping.is_set():
            try:
                messages = await self._fetch()
                backoff.reset()
            except (Unavailable, Full, NotFound) as error:
                pause = backoff.delay()
                log.warning("%s: %s; trying again in %.1f s", self.address, error, pause)
                await self._rest(pause)
                continue
            begun = 0
            try:
                if self._each:
                    for message in messages:
                        if self._stopping.is_set():
                            break
                        begun += 1
                        await self._handle(message, [message])
                elif messages:
                    begun = len(messages)
                    await self._handle(messages, messages)
            finally:
                if begun < len(messages) and not self._auto_ack:
                    await asyncio.shield(self._client.give_back(messages[begun:]))

    async def _fetch(self) -> list[Message]:
        poll = asyncio.ensure_future(
            self._client.pop(self.address, wait=LONG_POLL, patience=0.0, **self._options)
        )
        self._polls.add(poll)
        try:
            return await poll
        except asyncio.CancelledError:
            if self._stopping.is_set() and not _being_cancelled():
                return []  # our own stop, not someone who cancels the worker
            poll.cancel()
            raise
        finally:
            self._polls.discard(poll)

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _handle(self, argument: Message | list[Message], messages: Sequence[Message]) -> None:
        status: AckStatus = "completed"
        error: str | None = None
        delay = 0.0
        try:
            if self._threads:
                context = contextvars.copy_context()
                call = asyncio.get_running_loop().run_in_executor(
                    self._threads, context.run, _called, self._handler, argument
                )
                result = await call
                if isinstance(result, Awaitable):
                    await result
            else:
                await self._handler(argument)
        except Retry as again:
            status, delay = "retry", again.delay
        except DeadLetter as failure:
            status, error = "dlq", str(failure) or "put aside by the consumer"
        except (
            Exception,
            asyncio.CancelledError,
        ) as failure:  # whatever the user's code raises: an attempt that failed
            if isinstance(failure, asyncio.CancelledError) and _being_cancelled():
                raise  # not the handler's own: somebody cancels us
            status, error = "failed", f"{type(failure).__name__}: {failure}"
            log.exception("%s: the handler failed", self.address)
        if status == "completed":
            self.handled += len(messages)
        else:
            self.failed += len(messages)
        if self._auto_ack:
            return
        try:
            await self._client.ack(messages, status, error=error, delay=delay)
        except AckRefused as refused:
            log.warning("%s: %s", self.address, refused)
        except PenstockError as failure:
            log.warning(
                "%s: messages could not be acknowledged and will come again: %s",
                self.address,
                failure,
            )


def _called(handler: Handler, argument: Any) -> Any:
    try:
        return handler(argument)
    except StopIteration as error:  # a future cannot carry one: the worker would wait for ever
        raise RuntimeError("the handler raised StopIteration") from error


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
