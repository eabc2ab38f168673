"""`penstock.Client`: queues, topics, schedules, routes, dead letters and the broker's status, from
one object with one address, one token and one set of time-outs.

async with Client("http://127.0.0.1:6632") as client:
    await client.push("orders", {"id": 7}, partition="c-1", headers={"tenant": "a"})
    async for message in client.take("orders@billing", batch=10):
        ...
        await message.ack()
    offset = await client.topic("orders-log").produce(b"...")
"""

import asyncio
import operator
import os
import signal
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, TypedDict, TypeVar, Unpack

import msgspec

from penstock.client.admin import AdminClient, Routes, Schedules
from penstock.client.brokers import Brokers
from penstock.client.buffer import BufferOptions, PushBuffer, check_sent
from penstock.client.connection import Endpoint
from penstock.client.consumer import Consumer, ConsumerOptions, P, R
from penstock.client.former_names import FormerMethods, renamed
from penstock.client.handlers import Hook, hook_of
from penstock.client.health import HealthReporter
from penstock.client.items import Item
from penstock.client.messages import Address, Received
from penstock.client.queues import QueueClient
from penstock.client.stateful import StatefulConsumer
from penstock.client.topic import Topic, TopicBroker, find_endpoint
from penstock.contract import operations
from penstock.contract.broker import BrokerStatus
from penstock.errors import InvalidRequest, NotFound, Unavailable
from penstock.io.tasks import cancelled, supervised
from penstock.net.addresses import Token, parse_addresses
from penstock.net.tls import client_context
from penstock.protocol import frames
from penstock.protocol.frames import Command
from penstock.protocol.names import DEFAULT_PARTITION
from penstock.protocol.queue_options import QueueOptions

Generate = TypeVar("Generate", bound=Callable[..., Any])
DEFAULT_URL = "http://127.0.0.1:6632"
RELEASE_SECONDS = 1.0  # that `close` always has to release messages


class QueueSettings(TypedDict, total=False):
    """The options of `Client.configure`. `QueueOptions` has their defaults and meanings."""

    lease_time: int
    retry_limit: int
    retry_delay: int
    delayed_processing: int
    window_buffer: int
    max_size: int
    ttl: int
    priority: int
    dead_letter_queue: bool
    dlq_after_max_retries: bool
    retention_enabled: bool
    retention_seconds: int
    completed_retention_seconds: int
    max_wait_time_seconds: int
    encryption_enabled: bool
    record_deliveries: bool
    ordering: str


class Client(QueueClient, FormerMethods):
    """A client of one broker, or of several brokers on one database. Without a URL it uses
    PENSTOCK_URL, or http://127.0.0.1:6632.

    `token` (default: PENSTOCK_TOKEN) authenticates the client. It may be a function, which is
    called before each request. For https://, `ca` is the CA certificate to trust, as a PEM file or
    its text (default: PENSTOCK_CA_FILE, or the system's), or `tls` is an `ssl.SSLContext`.
    `timeout` is the time limit of one request in seconds. `retry_for` is how long a request is
    retried while no broker answers, in seconds. For topics, the client asks the broker for its TCP
    address, unless you set it with `topics` (`tcp://host:port`, default: PENSTOCK_BROKER).

    A client belongs to the event loop of its first request.
    """

    @renamed(patience="retry_for")
    def __init__(
        self,
        urls: str | Sequence[str] | None = None,
        *,
        token: Token | None = None,
        timeout: float = 30.0,
        retry_for: float = 30.0,
        pool_size: int = 64,
        ca: str | Path | None = None,
        tls: ssl.SSLContext | None = None,
        topics: str | None = None,
    ) -> None:
        if urls is None:
            urls = os.environ.get("PENSTOCK_URL") or DEFAULT_URL
        if token is None:
            token = os.environ.get("PENSTOCK_TOKEN")
        if topics is None:
            topics = os.environ.get("PENSTOCK_BROKER")
        if isinstance(urls, str):
            urls = [url.strip() for url in urls.split(",") if url.strip()]

        def context() -> ssl.SSLContext:
            return tls or client_context(ca)

        secure = any(url.startswith("https:") for url in urls)
        super().__init__(
            Brokers(
                urls,
                token=token,
                timeout=timeout,
                retry_for=retry_for,
                pool_size=pool_size,
                tls=context() if secure else tls,
            )
        )
        endpoint: Endpoint | Callable[[], Awaitable[Endpoint]]
        if topics:
            addresses, secure = parse_addresses(topics)
            endpoint = Endpoint(addresses, context() if secure else None)
        else:
            endpoint = partial(find_endpoint, self._brokers, context)
        self._topics = TopicBroker(endpoint, timeout=timeout, token=token)
        self._buffers: list[PushBuffer] = []
        self._consumers: list[Consumer[..., Any]] = []
        self._hooks: list[Hook] = []
        self._lifespans: list[Hook] = []
        self.admin = AdminClient(self._brokers)
        self.schedules = Schedules(self._brokers)
        self.routes = Routes(self._brokers)

    @classmethod
    def from_env(cls) -> Self:
        """Create a client from environment variables: PENSTOCK_URL, PENSTOCK_TOKEN,
        PENSTOCK_CA_FILE, PENSTOCK_BROKER (for topics), PENSTOCK_TIMEOUT and PENSTOCK_RETRY_FOR (in
        seconds).
        """
        return cls(**limits_from_env())

    def topic(self, name: str) -> Topic:
        """Return a topic. It does not have to exist: the first record creates it."""
        return Topic(self._topics, name)

    async def topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        return frames.read_names(await self._topics.ask(Command.LIST_TOPICS))

    async def status(self) -> BrokerStatus:
        """Return the health of the broker; with several brokers, of the first that answers."""
        statuses = await self._brokers.statuses()
        for _, status in statuses:
            if isinstance(status, BrokerStatus):
                return status
        failures = [f"{url}: {status}" for url, status in statuses]
        raise Unavailable(f"no broker answers ({'; '.join(failures)})")

    async def configure(
        self,
        queue: str,
        *,
        namespace: str | None = None,
        task: str | None = None,
        reset: bool = False,
        **options: Unpack[QueueSettings],
    ) -> QueueOptions:
        """Create a queue or change its options. Options you leave out stay as they are; with
        `reset` they get their defaults. Returns all options.
        """
        given = {_camel(name): value for name, value in options.items()}
        try:
            if not reset and namespace is None and task is None:
                changed = await self._brokers.call(
                    operations.CHANGE_QUEUE_OPTIONS, queue, body=given
                )
                return changed.options
            if not reset:
                before = await self._brokers.call(operations.GET_QUEUE_OPTIONS, queue)
                given = msgspec.to_builtins(before.options) | given
        except NotFound:
            pass
        body = {"queue": queue, "namespace": namespace or "", "task": task or "", "options": given}
        return (await self._brokers.call(operations.CONFIGURE_QUEUE, body=body)).options

    async def cancel(
        self, queue: str, transaction_id: str, *, partition: str = DEFAULT_PARTITION
    ) -> bool:
        """Cancel a delayed message. Returns False if there is none with this transaction id."""
        names = (queue, partition, transaction_id)
        try:
            await self._brokers.call(operations.CANCEL_SCHEDULED, *names)
        except NotFound:
            return False
        return True

    # Consumers and buffers

    @renamed(each=("batches", operator.not_))
    def consumer(
        self, address: str | Address, **options: Unpack[ConsumerOptions]
    ) -> Callable[[Callable[P, R]], Consumer[P, R]]:
        """Decorate a function as a consumer of `address`. `run` starts it.

        With `state`, the function gets the state of the message's partition as its last argument;
        changes of it, its pushes and the acknowledgement are committed together.
        """
        settings: dict[str, Any] = {**options}
        version, reset = settings.pop("state", None), settings.pop("reset_state", False)

        def register(handler: Callable[P, R]) -> Consumer[P, R]:
            consumer: Consumer[P, R]
            if version is None:
                consumer = Consumer(self, address, handler, **settings)
            else:
                consumer = StatefulConsumer(
                    self, address, handler, version=version, reset=reset, **settings
                )
            consumer.hooks = self._hooks
            self._consumers.append(consumer)
            return consumer

        return register

    def around(self, hook: Generate) -> Generate:
        """Decorate a generator function that runs around every call of a consumer's function. It
        gets the list of messages. The code before its `yield` runs before the call, the code after
        it runs after the call. An exception of the function is raised at the `yield`.
        """
        self._hooks.append(hook_of(hook))
        return hook

    def lifespan(self, hook: Generate) -> Generate:
        """Decorate a generator function that opens and closes what consumers need. `run` runs it up
        to its `yield` before it starts the consumers, and the rest after they have ended.
        """
        self._lifespans.append(hook_of(hook))
        return hook

    async def run(self, *, handle_signals: bool = True, drain_seconds: float | None = None) -> None:
        """Run all consumers until `stop` is called or SIGTERM arrives. SIGTERM is left alone if
        the program handles it itself, or with `handle_signals=False`.

        Messages in progress then have `drain_seconds` to finish (None: as long as they take). Those
        that do not finish are released. If a consumer fails, the others stop in the same way, and
        its error is raised.
        """
        async with AsyncExitStack() as stack:
            if handle_signals:
                stack.enter_context(stopping_on_signal(self.stop))
            for lifespan in self._lifespans:
                await stack.enter_async_context(lifespan())
            reporter = HealthReporter(self._brokers, self.admin, self._consumers)
            reporting = supervised("penstock consumer health", reporter.run)
            running = [asyncio.ensure_future(one.run(drain_seconds)) for one in self._consumers]
            try:
                if running:
                    await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
                    self.stop()
                    await asyncio.gather(*running)
            finally:
                await cancelled(reporting, *running)

    def stop(self) -> None:
        """Stop all consumers once they have finished the messages in progress."""
        for consumer in self._consumers:
            consumer.stop()

    def buffer(self, **options: Unpack[BufferOptions]) -> PushBuffer:
        """Create a buffer that collects pushes into batches."""
        if self._brokers.closed:
            raise InvalidRequest("the client is closed")
        buffer = PushBuffer(self, **options)
        self._buffers.append(buffer)
        return buffer

    async def close(self, timeout: float = 10.0) -> list[Item]:
        """Stop consumers, send what is in the buffers and close all connections, within `timeout`
        seconds. Returns the messages that could not be sent.

        Consumers get at most half of the time. Messages that `take` fetched but did not hand out
        are returned to the queue.
        """
        if self._brokers.closed:
            return []
        self.stop()
        clock = asyncio.get_running_loop().time
        ends = clock() + timeout
        running = [
            asyncio.ensure_future(consumer.ended(asyncio.current_task()))
            for consumer in self._consumers
        ]
        if running:
            _, late = await asyncio.wait(running, timeout=timeout / 2)
            for task in late:
                task.cancel()
        rest = max(0.0, ends - clock())
        unsent_items = await asyncio.gather(
            *(buffer.close(rest) for buffer in self._buffers if not buffer.closed)
        )
        unsent = [item for items in unsent_items for item in items]
        fetched: list[Received] = [one for messages in self._fetched.values() for one in messages]
        for messages in self._fetched.values():
            messages.clear()  # otherwise their loops would release them again
        if fetched:
            await asyncio.wait(
                [asyncio.ensure_future(self._give_back(fetched))],
                timeout=max(RELEASE_SECONDS, ends - clock()),
            )
        await self._leases.close()
        self._topics.close()
        await self._brokers.close()
        return unsent

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        unsent = await self.close()
        if kind is None:
            check_sent(unsent, "client")


@contextmanager
def stopping_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM, unless the program handles it itself."""
    loop = asyncio.get_running_loop()
    if not sigterm_is_free():
        yield
        return
    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def sigterm_is_free() -> bool:
    """Return whether we may handle SIGTERM: in the main thread, if the program does not."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def limits_from_env() -> dict[str, Any]:
    """Return the timeouts of a client that the environment sets."""
    limits = {}
    for name, variable in (
        ("timeout", "PENSTOCK_TIMEOUT"),
        ("retry_for", "PENSTOCK_PATIENCE"),  # its former name
        ("retry_for", "PENSTOCK_RETRY_FOR"),
    ):
        if text := os.environ.get(variable):
            try:
                limits[name] = float(text)
            except ValueError:
                raise InvalidRequest(f"{variable} is a number of seconds, not {text!r}") from None
    return limits


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
