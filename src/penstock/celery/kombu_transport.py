"""The transport: wait for messages of all queues at once.

Each consumed queue has one pop that waits at the broker, on a socket of its own. Celery's event
loop (prefork, threads and solo) watches the sockets; `drain_events` (gevent, and programs that use
kombu) polls them. No queue is asked again and again.

A broken socket is not an error of kombu's connection: the pop is sent again, to the next broker if
the URL names several, and leases stay valid. If no broker answers for `patience` seconds, Celery
gets the error and connects again in its own way.
"""

import logging
import os
import select
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from kombu.transport import virtual
from kombu.utils.url import parse_url

from penstock.celery.channel import QueueChannel, Source
from penstock.client.blocking import BlockingBrokers, Line
from penstock.client.settler import Settler
from penstock.errors import InvalidRequest, PenstockError, Unavailable
from penstock.net.addresses import TOKEN_VARIABLE, Token
from penstock.net.retry import Backoff
from penstock.net.tls import client_context

log = logging.getLogger("penstock.celery")

WAIT_SECONDS = 30.0  # that a pop waits at the broker
LATE_SECONDS = 15.0  # after which a pop without an answer is sent again
PATIENCE_SECONDS = 30.0
PUBLISH_PATIENCE_SECONDS = 5.0
CLOSE_SECONDS = 5.0
ABANDON_SECONDS = 2.0
TURN_SECONDS = 0.1  # between turns of the event loop while something waits for the clock
# How often `drain_events` checks a full window, which another thread or greenlet may open.
FULL_WINDOW_SECONDS = 0.02


class Taker:
    """The pop of one queue that waits at the broker."""

    def __init__(self, channel: QueueChannel, queue: str, brokers: BlockingBrokers) -> None:
        self.channel = channel
        self.queue = queue
        self.batch = 0  # what the waiting pop may bring; 0: none waits
        self.number = 0  # of the pops so far; each may have another socket
        self.line = Line(brokers)
        self._sent_at = 0.0
        self._failing_since: float | None = None
        self._backoff = Backoff()
        self.not_before = 0.0  # when to try again after a failure

    def start(self, batch: int) -> None:
        target = self.channel.source(self.queue).pop_target(batch, WAIT_SECONDS)
        self._sent_at = time.monotonic()
        try:
            self.line.send("GET", target)
            self.batch = batch
            self.number += 1
        except Unavailable as error:
            self._failed(error)

    def receive(self) -> None:
        """Read what has arrived."""
        try:
            answer = self.line.wait()
        except Unavailable as error:
            self.batch = 0
            self._failed(error)
            return
        if answer is not None:
            self.batch = 0
            if self._failing_since is not None:
                log.warning("taking from %r resumes", self.queue)
                self._failing_since, self._backoff = None, Backoff()
            self.channel.receive(self.queue, answer)

    def check(self) -> None:
        """Give up a pop whose answer is overdue: the broker is frozen or unreachable."""
        if self.batch and time.monotonic() > self._sent_at + WAIT_SECONDS + LATE_SECONDS:
            self.line.close()
            self.batch = 0
            self._failed(Unavailable("a pop was not answered in time"))

    def stop(self) -> None:
        """End the waiting pop; what it brings nevertheless goes back to the queue."""
        if self.batch:
            self.batch = 0
            answer = self.line.abandon(ABANDON_SECONDS)
            if answer is not None:
                self.channel.receive(self.queue, answer)
        self.line.close()

    def _failed(self, error: Unavailable) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            log.warning("taking from %r waits for a broker: %s", self.queue, error)
        elif now - self._failing_since > self.channel.connection.patience:
            self._failing_since = None
            raise error
        self.not_before = now + self._backoff.delay()


class Transport(virtual.Transport):  # type: ignore[misc]
    Channel = QueueChannel
    default_port = 6632
    # Celery takes this to mean that events, gossip and mingle go through fanout exchanges.
    driver_type = "redis"
    driver_name = "penstock"
    implements = virtual.Transport.implements.extend(
        asynchronous=True,
        exchange_type=frozenset(["direct", "topic", "fanout"]),
    )
    connection_errors = (*virtual.Transport.connection_errors, Unavailable, OSError)
    channel_errors = (*virtual.Transport.channel_errors, PenstockError)

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        settings = client.transport_options
        self.patience = float(settings.get("patience", PATIENCE_SECONDS))
        self.publish_patience = float(settings.get("publish_patience", PUBLISH_PATIENCE_SECONDS))
        self.brokers = _brokers(client)
        self.line = Line(self.brokers)  # for all requests that do not wait for messages
        self.settler = Settler(self.brokers)
        self.sources: dict[str, Source] = {}  # by the name of kombu's queue
        self.created: set[str] = set()  # queues that exist
        self.ready: deque[tuple[QueueChannel, str, dict[str, Any]]] = (
            deque()
        )  # taken, not delivered
        self._takers: dict[tuple[QueueChannel, str], Taker] = {}
        self._loop: Any = None  # Celery's event loop, if it uses one
        self._turning: Any = None  # a timer of the event loop
        # the sockets in the event loop: file descriptor and number of the pop that waits there
        self._watched: dict[Taker, tuple[int, int]] = {}

    def driver_version(self) -> str:
        from penstock import __version__

        return __version__

    def establish_connection(self) -> "Transport":
        """Check address and token."""
        self.line.json("GET", "/api/v1/me")
        super().establish_connection()
        return self

    def close_connection(self, connection: Any) -> None:
        self._unregister()
        super().close_connection(connection)
        self.settler.close(CLOSE_SECONDS)
        self.line.close()

    def undelivered(self, channel: QueueChannel) -> int:
        return sum(1 for owner, _, _ in self.ready if owner is channel)

    # Consume

    def consume(self, channel: QueueChannel, queue: str, deliver: Callable[[Any], None]) -> None:
        self._callbacks[queue] = deliver
        self._takers[channel, queue] = Taker(channel, queue, self.brokers)

    def cancel(self, channel: QueueChannel, queue: str) -> None:
        self._callbacks.pop(queue, None)
        taker = self._takers.pop((channel, queue), None)
        if taker is not None:
            self._unwatch(taker)
            taker.stop()
        self.return_ready(channel, queue)

    def return_ready(self, channel: QueueChannel, queue: str | None = None) -> None:
        """Return what was taken for a channel, or for one of its queues, and not delivered."""
        kept: list[tuple[QueueChannel, str, dict[str, Any]]] = []
        for one in self.ready:
            if one[0] is channel and queue in (None, one[1]):
                channel.settle(one[2]["properties"]["delivery_tag"], "retry")
            else:
                kept.append(one)
        self.ready = deque(kept)

    def _start_pops(self) -> None:
        """Have a pop wait for every queue whose channel may take messages."""
        now = time.monotonic()
        idle: dict[QueueChannel, list[Taker]] = {}
        waiting: dict[QueueChannel, int] = {}
        for taker in list(self._takers.values()):
            taker.check()
            if taker.batch:
                waiting[taker.channel] = waiting.get(taker.channel, 0) + taker.batch
            elif taker.not_before <= now:
                idle.setdefault(taker.channel, []).append(taker)
        for channel, takers in idle.items():
            channel.give_back_held()
            wanted = channel.wanted()
            share = (wanted - waiting.get(channel, 0)) // len(takers)
            for taker in takers:
                if wanted > 0 or channel.source(taker.queue).transient:
                    taker.start(max(1, share))

    def _deliver_ready(self) -> bool:
        for place, (channel, queue, raw) in enumerate(self.ready):
            if channel.can_deliver(queue):
                del self.ready[place]
                self._deliver(raw, queue)
                return True
        return False

    def drain_events(self, _: Any, timeout: float | None = None) -> None:
        """Deliver one message. Raises `TimeoutError` if none arrives within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._deliver_ready():
                return
            self._start_pops()
            waiting = [taker for taker in self._takers.values() if taker.batch]
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimeoutError("no message arrived in time")
            pause = 1.0 if deadline is None else min(1.0, deadline - now)
            if len(waiting) < len(self._takers):
                pause = min(pause, FULL_WINDOW_SECONDS)
            poll = select.poll()
            for taker in waiting:
                poll.register(taker.line.fileno(), select.POLLIN)
            arrived = {fd for fd, _ in poll.poll(pause * 1000)}
            for taker in waiting:
                if taker.line.fileno() in arrived:
                    taker.receive()

    # Celery's event loop

    def register_with_event_loop(self, _: Any, loop: Any) -> None:
        self._loop = loop
        loop.on_tick.add(self._tick)

    def _unregister(self) -> None:
        if self._loop is not None:
            for taker in list(self._watched):
                self._unwatch(taker)
            self._loop.on_tick.discard(self._tick)
            if self._turning is not None:
                self._turning.cancel()
            self._loop = self._turning = None

    def _tick(self) -> None:
        """Deliver, start pops and watch their sockets, before each turn of the event loop."""
        self._deliver_all()
        self._start_pops()
        for taker in self._takers.values():
            if taker.batch:
                self._watch(taker)
            elif taker.not_before > time.monotonic():
                self._turn_soon()
        if self.ready:
            self._turn_soon()  # they go back if they are not delivered soon

    def _turn_soon(self) -> None:
        """Have the event loop turn again without an event."""
        if self._turning is None:
            self._turning = self._loop.call_later(TURN_SECONDS, self._turned)

    def _turned(self) -> None:
        self._turning = None

    def _watch(self, taker: Taker) -> None:
        """Watch the socket of the pop that waits. A socket is watched for one pop only: a later one
        may have another socket with the same file descriptor.
        """
        _, number = self._watched.get(taker, (-1, 0))
        if number != taker.number:
            self._unwatch(taker)
            fd = taker.line.fileno()
            self._watched[taker] = fd, taker.number
            self._loop.add_reader(fd, self._on_readable, taker)

    def _unwatch(self, taker: Taker) -> None:
        fd, _ = self._watched.pop(taker, (-1, 0))
        if fd >= 0 and self._loop is not None:
            self._loop.remove_reader(fd)

    def _on_readable(self, taker: Taker) -> None:
        try:
            taker.receive()
        finally:
            if not taker.batch:
                self._unwatch(taker)
        self._deliver_all()

    def _deliver_all(self) -> None:
        while self._deliver_ready():
            pass


def _brokers(client: Any) -> BlockingBrokers:
    """Return the brokers of kombu's connection: the one it uses now, then its alternates."""
    hosts = [_address(client.hostname, client.port)]
    token: Token | None = client.transport_options.get("token") or client.password or None
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    secure = bool(client.ssl) or client.transport_cls == "penstocks"
    for url in client.alt:
        if "://" in url:
            parts = parse_url(url)
            hosts.append(_address(parts["hostname"], parts["port"]))
            secure = secure or parts["transport"] == "penstocks"
    scheme = "https" if secure else "http"
    urls = [f"{scheme}://{host}" for host in dict.fromkeys(hosts)]
    return BlockingBrokers(
        urls, token=token, tls=_tls(client.ssl) if secure else None, timeout=client.connect_timeout
    )


def _address(host: str | None, port: int | None) -> str:
    host = host or "127.0.0.1"
    return f"{f'[{host}]' if ':' in host else quote(host)}:{port or Transport.default_port}"


def _tls(setting: Any) -> ssl.SSLContext:
    """Return the context for `broker_use_ssl`: True, or a dict with `ca_certs`, `certfile`,
    `keyfile`.
    """
    if isinstance(setting, ssl.SSLContext):
        return setting
    if not isinstance(setting, dict):
        return client_context()
    unknown = set(setting) - {"ca_certs", "certfile", "keyfile"}
    if unknown:
        raise InvalidRequest(f"broker_use_ssl has no {', '.join(sorted(unknown))}")
    return client_context(setting.get("ca_certs"), setting.get("certfile"), setting.get("keyfile"))
