"""The client for code that is not async: the same calls, run on an event loop in a thread of its
own.

`Portal` is the machinery: one daemon thread with one loop, `call` runs a coroutine there and gives
its result back, `iterate` turns an async iterator into a plain one. A facade holds a portal and the
async object and adds nothing else.
"""

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import uvloop

from penstock.client import topics
from penstock.client.producer import Delivery, Producer
from penstock.client.reader import Reader, Start
from penstock.errors import PenstockError, Unavailable
from penstock.net.addresses import Address, Token
from penstock.protocol.frames import Bytes, Info
from penstock.protocol.record_batch import Batch, Record

T = TypeVar("T")
P = ParamSpec("P")
CANCEL_PATIENCE = 5.0  # seconds an interrupted call may take to end
CLOSED = "the client is closed (or was made before a fork: make one in each process)"
# seconds; a signal that arrives just before the main thread begins to wait does not wake it: it has
# to look
LOOK = 0.25


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
            tasks[0].add_done_callback(settle)

        def settle(task: asyncio.Task[T]) -> None:
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
                    return outcome.result(LOOK)
                except TimeoutError:
                    if outcome.done():  # the call's own
                        return outcome.result()
                    if (
                        not self._thread.is_alive()
                    ):  # closed, or lost in a fork: nobody will ever answer
                        raise Unavailable(CLOSED) from None
        except BaseException:
            if not outcome.done() and self._thread.is_alive():
                self._loop.call_soon_threadsafe(cancel)
                wait([outcome], CANCEL_PATIENCE)
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
            if (
                close is not None and self._thread.is_alive()
            ):  # it may be collected after the portal was closed
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


class Facade:
    _portal: Portal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> Any:
        raise NotImplementedError


class SyncProducer(Facade):
    """A `Producer` for plain code; `send` waits only while the buffer is full."""

    def __init__(self, portal: Portal, producer: Producer) -> None:
        self._portal, self._producer = portal, producer

    def send(self, payload: Bytes) -> Delivery:
        return self._portal.call(self._producer.send, payload)

    def send_many(self, payloads: Iterable[Bytes]) -> None:
        """Much cheaper than many `send`s: one crossing between the threads for all of them."""
        self._portal.call(self._producer.send_many, payloads)

    def offset(self, delivery: Delivery) -> int:
        """Wait until the record is stored."""
        return self._portal.call(_result, delivery)

    @property
    def failure(self) -> PenstockError | None:
        return self._producer.failure

    @property
    def stored(self) -> tuple[int, int | None, int | None]:
        """How many records are stored, and the offsets of the first and the last one."""
        return self._producer.records, self._producer.first_offset, self._producer.last_offset

    def flush(self) -> None:
        self._portal.call(self._producer.flush)

    def abort(self) -> None:
        """Stop at once; what has no answer yet fails."""
        self._portal.make(self._producer.abort)

    def close(self) -> None:
        self._portal.call(self._producer.close)


class SyncReader(Facade):
    def __init__(self, portal: Portal, reader: Reader) -> None:
        self._portal, self._reader = portal, reader

    @property
    def position(self) -> int | None:
        return self._reader.position

    def __iter__(self) -> Iterator[Record]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[Batch]:
        return self._portal.iterate(self._reader.batches())

    def complete(self) -> None:
        self._portal.call(self._reader.complete)

    def close(self) -> None:
        self._portal.call(self._reader.close)


class SyncTopicClient(Facade):
    """`TopicClient` for plain code: the same methods, without await."""

    def __init__(
        self,
        addresses: str | Sequence[str | Address] = "127.0.0.1:12345",
        *,
        timeout: float = 30.0,
        connect_timeout: float = 5.0,
        token: Token | None = None,
        ca: str | Path | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._portal = Portal()
        try:
            self._client = self._portal.make(
                lambda: topics.TopicClient(
                    addresses,
                    timeout=timeout,
                    connect_timeout=connect_timeout,
                    token=token,
                    ca=ca,
                    tls=tls,
                )
            )
        except BaseException:
            self._portal.close()
            raise

    def close(self) -> None:
        self._portal.call(self._client.close)
        self._portal.close()

    def create(self, topic: str) -> None:
        self._portal.call(self._client.create, topic)

    def delete(self, topic: str) -> None:
        self._portal.call(self._client.delete, topic)

    def names(self) -> list[str]:
        return self._portal.call(self._client.names)

    def info(self, topic: str) -> Info:
        return self._portal.call(self._client.info, topic)

    def next_offset(self, topic: str) -> int:
        return self._portal.call(self._client.next_offset, topic)

    def offset_at(self, topic: str, at: datetime) -> int:
        return self._portal.call(self._client.offset_at, topic, at)

    def produce(self, topic: str, *payloads: Bytes) -> int:
        return self._portal.call(self._client.produce, topic, *payloads)

    def consume(self, topic: str, start: int = 0, max_records: int = 100) -> list[Record]:
        return self._portal.call(self._client.consume, topic, start, max_records)

    def commit(self, topic: str, group: str, offset: int) -> None:
        self._portal.call(self._client.commit, topic, group, offset)

    def committed(self, topic: str, group: str) -> tuple[int, int]:
        return self._portal.call(self._client.committed, topic, group)

    def producer(self, topic: str, **options: Any) -> SyncProducer:
        return SyncProducer(
            self._portal, self._portal.make(lambda: self._client.producer(topic, **options))
        )

    def reader(self, topic: str, start: Start = "earliest", **options: Any) -> SyncReader:
        return SyncReader(
            self._portal, self._portal.make(lambda: self._client.reader(topic, start, **options))
        )
