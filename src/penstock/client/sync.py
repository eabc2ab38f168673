"""The client for code that is not async: the same calls, run on an event loop in a thread of its
own.

`Portal` is the machinery: one daemon thread with one loop, `call` runs a coroutine there and gives
its result back, `iterate` turns an async iterator into a plain one. A facade holds a portal and the
async object and adds nothing else.
"""

import asyncio
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import uvloop

from penstock.client.producer import Delivery, Producer
from penstock.client.reader import Reader, Start
from penstock.client.topics import TopicClient
from penstock.errors import PenstockError, Unavailable
from penstock.net.addresses import Address
from penstock.protocol.record_batch import Batch, Record

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")
CANCEL_SECONDS = 5.0  # an interrupted call may take so long to end
CLOSED = "the client is closed (or was made before a fork: make one in each process)"
# A signal that arrives just before the main thread begins to wait does not wake it: it has to look.
SIGNAL_POLL_SECONDS = 0.25


class Portal:
    """An event loop in a background thread."""

    def __init__(self, name: str = "penstock-client") -> None:
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` to its end in the portal's thread. Ctrl-C here cancels it there, and waits
        until it has ended: what the caller does next (closing an iterator, say) must not meet it
        still running."""
        outcome: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        async def run() -> T:
            return await function(*args, **kwargs)

        def begin() -> None:
            tasks.append(self._loop.create_task(run()))
            tasks[0].add_done_callback(finish)

        def finish(task: asyncio.Task[T]) -> None:
            error = CancelledError() if task.cancelled() else task.exception()
            if error is None:
                outcome.set_result(task.result())
            else:
                outcome.set_exception(error)

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        if not self._thread.is_alive():
            raise Unavailable(CLOSED)
        try:
            try:
                self._loop.call_soon_threadsafe(begin)
            except RuntimeError:  # closed by another thread in this very moment
                raise Unavailable(CLOSED) from None
            while True:
                try:
                    return outcome.result(SIGNAL_POLL_SECONDS)
                except TimeoutError:
                    if outcome.done():  # the call's own
                        return outcome.result()
                    if not self._thread.is_alive():  # closed, or lost in a fork
                        raise Unavailable(CLOSED) from None
        except BaseException:
            if not outcome.done() and self._thread.is_alive():
                self._loop.call_soon_threadsafe(cancel)
                wait([outcome], CANCEL_SECONDS)
            raise

    def make(self, build: Callable[[], T]) -> T:
        """Build an object that belongs to the loop."""

        async def in_loop() -> T:
            return build()

        return self.call(in_loop)

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        """The async iterator's items; closed when this generator is."""
        try:
            while True:
                try:
                    yield self.call(source.__anext__)
                except StopAsyncIteration:
                    return
        finally:
            close = getattr(source, "aclose", None)
            # this generator may be collected after the portal was closed
            if close is not None and self._thread.is_alive():
                self.call(close)

    def close(self) -> None:
        """End the loop. Calls of other threads that are under way are cut off."""
        if not self._thread.is_alive():
            return
        self.call(_cancel_rest)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _result(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def _cancel_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def blocking(
    method: Callable[Concatenate[S, P], Awaitable[T]],
) -> Callable[Concatenate[Any, P], T]:
    """A facade's method: the async object's, run to its end."""

    @functools.wraps(method)
    def call(self: "Facade[S]", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._portal.call(method, self._async, *args, **kwargs)

    return call


class Facade(ABC, Generic[S]):
    """Holds a portal and the async object that lives on its loop. A context manager that closes."""

    _portal: Portal
    _async: S

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> Any:
        """End what the async object does."""


class SyncProducer(Facade[Producer]):
    """A `Producer` for plain code; `send` waits only while the buffer is full.

    with client.producer("orders") as producer:
        producer.send_many(lines)
    """

    def __init__(self, portal: Portal, producer: Producer) -> None:
        self._portal = portal
        self._async = producer

    send = blocking(Producer.send)
    send_many = blocking(Producer.send_many)  # one crossing between the threads for all of them
    flush = blocking(Producer.flush)
    close = blocking(Producer.close)

    def offset(self, delivery: Delivery) -> int:
        """Wait until the record is stored; its offset, or the error that it failed with."""
        return self._portal.call(_result, delivery)

    @property
    def failure(self) -> PenstockError | None:
        """The first error that a record failed with; `flush` and `close` raise it."""
        return self._async.failure

    @property
    def stored(self) -> tuple[int, int | None, int | None]:
        """How many records are stored, and the offsets of the first and the last one."""
        return self._async.records, self._async.first_offset, self._async.last_offset

    def abort(self) -> None:
        """Stop at once; what has no answer yet fails."""
        self._portal.make(self._async.abort)


class SyncReader(Facade[Reader]):
    """A `Reader` for plain code: iterate over it for records, or over `batches()`."""

    def __init__(self, portal: Portal, reader: Reader) -> None:
        self._portal = portal
        self._async = reader

    complete = blocking(Reader.complete)
    close = blocking(Reader.close)

    @property
    def position(self) -> int | None:
        """The offset after the last record that was given out; None before the first one."""
        return self._async.position

    def __iter__(self) -> Iterator[Record]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[Batch]:
        """As `Reader.batches`."""
        return self._portal.iterate(self._async.batches())


class SyncTopicClient(Facade[TopicClient]):
    """`TopicClient` for plain code: the same methods, without await.

    with SyncTopicClient("broker:12345") as client:
        client.produce("orders", b"one", b"two")
    """

    def __init__(
        self, addresses: str | Sequence[str | Address] = "127.0.0.1:12345", **options: Any
    ) -> None:
        """The options are those of `TopicClient`."""
        self._portal = Portal()
        try:
            self._async = self._portal.make(lambda: TopicClient(addresses, **options))
        except BaseException:
            self._portal.close()
            raise

    create = blocking(TopicClient.create)
    delete = blocking(TopicClient.delete)
    names = blocking(TopicClient.names)
    info = blocking(TopicClient.info)
    next_offset = blocking(TopicClient.next_offset)
    offset_at = blocking(TopicClient.offset_at)
    produce = blocking(TopicClient.produce)
    consume = blocking(TopicClient.consume)
    commit = blocking(TopicClient.commit)
    committed = blocking(TopicClient.committed)

    def close(self) -> None:
        """As `TopicClient.close`; ends the thread too."""
        self._portal.call(self._async.close)
        self._portal.close()

    def producer(self, topic: str, **options: Any) -> SyncProducer:
        """As `TopicClient.producer`."""
        make = functools.partial(self._async.producer, topic, **options)
        return SyncProducer(self._portal, self._portal.make(make))

    def reader(self, topic: str, start: Start = "earliest", **options: Any) -> SyncReader:
        """As `TopicClient.reader`."""
        make = functools.partial(self._async.reader, topic, start, **options)
        return SyncReader(self._portal, self._portal.make(make))
