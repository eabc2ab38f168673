"""The transport: wait for messages of all queues at once.

All consumed queues share one pop that waits at the broker. Celery's event loop (prefork, threads
and solo) watches its socket; `drain_events` (gevent, and programs that use kombu) waits for it. No
queue is polled. The queue that was served last is asked last by the next pop.

While a channel has as many messages as its prefetch count allows, the pop asks for its broadcasts
and replies only. Such a pop is ended when the channel may take messages again. Fast tasks do not
cause any: it starts after BUSY_SECONDS.

A broken socket is not an error of kombu's connection: the pop is sent again, to the next broker if
the URL names several, and leases stay valid. If no broker answers for `patience` seconds, Celery
gets the error and connects again in its own way.
"""

import logging
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from kombu.transport import virtual
from kombu.utils.url import parse_url

from penstock.blocking import Backoff, BlockingBrokers, Line, Settler
from penstock.celery.channel import QueueChannel, Source
from penstock.errors import InvalidRequest, PenstockError, Unavailable

log = logging.getLogger("penstock.celery")

WAIT_SECONDS = 30.0  # that a pop waits at the broker
LATE_SECONDS = 15.0  # after which a pop without an answer is sent again
PATIENCE_SECONDS = 30.0
PUBLISH_PATIENCE_SECONDS = 5.0
CLOSE_SECONDS = 5.0
ABANDON_SECONDS = 2.0
TURN_SECONDS = 0.1  # between turns of the event loop while something waits for the clock
BUSY_SECONDS = 0.05  # that a channel is busy before the pop waits for the other queues only
# How often `drain_events` checks a full window, which another thread or greenlet may open.
FULL_WINDOW_SECONDS = 0.02
TIDY_SECONDS = 600.0  # how often a consumer removes the remains of killed clients


Consumed = tuple[QueueChannel, str]  # a queue of kombu that a channel consumes


class LongPop:
    """The pop that waits at the broker."""

    def __init__(self, transport: "Transport") -> None:
        self._transport = transport
        self.line = Line(transport.brokers)
        self.sources: list[Consumed] = []  # what the waiting pop may bring; empty: none waits
        self._sent_at = 0.0
        self._failing_since: float | None = None
        self._backoff = Backoff()
        self.not_before = 0.0  # when to try again after a failure

    def start(self, batches: dict[Consumed, int]) -> None:
        wanted = [channel.source(queue).wanted(n) for (channel, queue), n in batches.items()]
        self._sent_at = time.monotonic()
        try:
            self.line.send_pop(wanted, WAIT_SECONDS)
            self.sources = list(batches)
        except Unavailable as error:
            self._failed(error)

    def receive(self, timeout: float = 0.0) -> None:
        """Read what has arrived, or arrives within `timeout` seconds."""
        try:
            answer = self.line.wait(timeout)
        except Unavailable as error:
            self.sources = []
            self._failed(error)
            return
        except PenstockError:
            self.sources = []
            raise
        if answer is not None:
            sources, self.sources = self.sources, []
            if self._failing_since is not None:
                log.warning("taking messages resumes")
                self._failing_since, self._backoff = None, Backoff()
            self._transport.received(sources, answer)

    def check(self) -> None:
        """Give up a pop whose answer is overdue: the broker is frozen or unreachable."""
        if self.sources and time.monotonic() > self._sent_at + WAIT_SECONDS + LATE_SECONDS:
            self.line.close()
            self.sources = []
            self._failed(Unavailable("a pop was not answered in time"))

    def stop(self) -> None:
        """End the waiting pop, and keep what it brings nevertheless."""
        sources, self.sources = self.sources, []
        if sources and (answer := self.line.abandon(ABANDON_SECONDS)) is not None:
            self._transport.received(sources, answer)

    def _failed(self, error: Unavailable) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            log.warning("taking messages waits for a broker: %s", error)
        elif now - self._failing_since > self._transport.patience:
            self._failing_since = None
            raise error
        self.not_before = now + self._backoff.delay()


class Transport(virtual.Transport):  # type: ignore[misc]
    Channel = QueueChannel
    can_parse_url = True  # kombu forgets the scheme if `broker_transport` names this class
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
        self._consumed: list[Consumed] = []  # the one that was served last at the end
        self._pop = LongPop(self)
        self._busy_since: float | None = None  # since when a channel takes no messages
        self._tidied_at = time.monotonic()
        self._loop: Any = None  # Celery's event loop, if it uses one
        self._turning: Any = None  # a timer of the event loop
        self._watched = -1  # the pop's file descriptor in the event loop

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
        self._pop.line.close()
        self.line.close()

    def undelivered(self, channel: QueueChannel) -> int:
        return sum(1 for owner, _, _ in self.ready if owner is channel)

    # Consume

    def consume(self, channel: QueueChannel, queue: str, deliver: Callable[[Any], None]) -> None:
        self._callbacks[queue] = deliver
        self._consumed.append((channel, queue))

    def cancel(self, channel: QueueChannel, queue: str) -> None:
        self._end_pop()
        self._callbacks.pop(queue, None)
        if (channel, queue) in self._consumed:
            self._consumed.remove((channel, queue))
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

    def received(self, sources: list[Consumed], answer: Any) -> None:
        """Keep the messages of a pop for the channel that wants them."""
        popped = self.settler.take(answer)
        if popped.messages:
            channel, queue = served = sources[popped.source]
            channel.receive(queue, popped.messages)
            self._consumed.remove(served)
            self._consumed.append(served)

    def _start_pop(self) -> None:
        """Have a pop wait for every queue whose channel may take messages."""
        pop, now = self._pop, time.monotonic()
        pop.check()
        if not pop.sources:
            self._unwatch()
            if now > self._tidied_at + TIDY_SECONDS:
                self._tidied_at = now
                self._tidy()
        if len(pop.sources) == len(self._consumed) and not self.ready:
            return
        room: dict[QueueChannel, int] = {}
        for channel in dict.fromkeys(channel for channel, _ in self._consumed):
            channel.give_back_held()
            room[channel] = channel.wanted()
        batches = {
            (channel, queue): max(1, room[channel])
            for channel, queue in self._consumed
            if room[channel] > 0 or channel.source(queue).transient
        }
        if len(batches) == len(self._consumed):
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = now
        if pop.sources and batches.keys() - set(pop.sources):
            self._end_pop()
            if self.ready:
                return  # they are delivered first
        busy = self._busy_since is not None and now < self._busy_since + BUSY_SECONDS
        if batches and not (pop.sources or busy or now < pop.not_before):
            pop.start(batches)

    def _tidy(self) -> None:
        """Remove listeners and reply queues of clients that were killed."""
        try:
            for channel in dict.fromkeys(channel for channel, _ in self._consumed):
                channel.remove_unused()
        except PenstockError as error:
            log.debug("listeners and queues of killed clients are not removed: %s", error)

    def _end_pop(self) -> None:
        self._unwatch()
        self._pop.stop()

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
            self._start_pop()
            if self.ready and self._deliver_ready():
                return
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimeoutError("no message arrived in time")
            pause = 1.0 if deadline is None else min(1.0, deadline - now)
            if len(self._pop.sources) < len(self._consumed):
                pause = min(pause, FULL_WINDOW_SECONDS)
            if self._pop.sources:
                self._pop.receive(pause)
            else:
                time.sleep(pause)

    # Celery's event loop

    def register_with_event_loop(self, _: Any, loop: Any) -> None:
        self._loop = loop
        loop.on_tick.add(self._tick)

    def _unregister(self) -> None:
        if self._loop is not None:
            self._unwatch()
            self._loop.on_tick.discard(self._tick)
            if self._turning is not None:
                self._turning.cancel()
            self._loop = self._turning = None

    def _tick(self) -> None:
        """Deliver, start a pop and watch its socket, before each turn of the event loop."""
        self._deliver_all()
        self._start_pop()
        if self._pop.sources and self._watched < 0:
            self._watched = self._pop.line.fileno()
            self._loop.add_reader(self._watched, self._on_readable)
        if self.ready or (self._consumed and not self._pop.sources):
            self._turn_soon()

    def _turn_soon(self) -> None:
        """Have the event loop turn again without an event."""
        if self._turning is None:
            self._turning = self._loop.call_later(TURN_SECONDS, self._turned)

    def _turned(self) -> None:
        self._turning = None

    def _unwatch(self) -> None:
        """End the watch of a pop that has ended: the next one may have another socket."""
        fd, self._watched = self._watched, -1
        if fd >= 0:
            self._loop.remove_reader(fd)

    def _on_readable(self) -> None:
        try:
            self._pop.receive()
        finally:
            if not self._pop.sources:
                self._unwatch()
        self._deliver_all()

    def _deliver_all(self) -> None:
        while self._deliver_ready():
            pass


def _brokers(client: Any) -> BlockingBrokers:
    """Return the brokers of kombu's connection: the one it uses now, then its alternates."""
    first = {"hostname": client.hostname, "port": None, "password": None}
    first["transport"] = client.transport_cls
    if "://" in (client.hostname or ""):  # otherwise kombu has switched to an alternate
        first = parse_url(client.hostname)
    first["port"] = first["port"] or client.port
    places = [first, *(parse_url(url) for url in client.alt if "://" in url)]
    secure = bool(client.ssl) or any(one["transport"] == "penstocks" for one in places)
    hosts = [_address(one["hostname"], one["port"]) for one in places]
    client.password = first["password"] or client.password
    # kombu and Celery log and copy the host name: it contains the scheme, but not the token.
    client.hostname = f"{'penstocks' if secure else 'penstock'}://{hosts[0]}"
    return BlockingBrokers(
        [f"{'https' if secure else 'http'}://{host}" for host in dict.fromkeys(hosts)],
        token=client.transport_options.get("token") or client.password,
        timeout=client.connect_timeout,
        **(_tls(client.ssl) if secure else {}),
    )


def _address(host: str | None, port: int | None) -> str:
    host = host or "127.0.0.1"
    return f"{f'[{host}]' if ':' in host else quote(host)}:{port or Transport.default_port}"


def _tls(setting: Any) -> dict[str, Any]:
    """Return the arguments for `broker_use_ssl`: True, an `ssl.SSLContext`, or a dict with
    `ca_certs`, `certfile` and `keyfile`.
    """
    if isinstance(setting, ssl.SSLContext):
        return {"tls": setting}
    given = dict(setting) if isinstance(setting, dict) else {}
    names = {"ca_certs": "ca", "certfile": "certificate", "keyfile": "key"}
    unknown = set(given) - set(names)
    if unknown:
        raise InvalidRequest(f"broker_use_ssl has no {', '.join(sorted(unknown))}")
    return {names[name]: value for name, value in given.items()}
