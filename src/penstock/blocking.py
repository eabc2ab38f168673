"""A small client without an event loop, for integrations into frameworks that fork, use threads or
replace the socket module (gevent).

    brokers = BlockingBrokers(["http://127.0.0.1:6632"])
    line, settler = Line(brokers), Settler(brokers)
    popped = settler.take(line.pop([{"queue": "orders", "batch": 10}, {"queue": "mail"}], wait=30))
    for message in popped.messages:
        print(message.queue, message.data)
        settler.settle(message, "completed")
    settler.close(timeout=5)

`penstock.SyncClient` is the client for programs: it has an event loop in a thread. A `Line` is one
socket that carries one request at a time. `json` calls any operation of the HTTP API. A program can
watch a waiting pop (`send_pop`, `fileno`, `wait`) and end it (`abandon`). A `Settler` has a thread,
under gevent a greenlet.

All brokers on one database are equal: any of them can renew and settle a lease that another one
granted. So the framework sees no error when a broker is lost, as long as a broker answers within
`retry_for`.
"""

import atexit
import logging
import os
import ssl
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.client.brokers import check, understood
from penstock.client.items import storable
from penstock.client.messages import Popped, Received
from penstock.contract import operations
from penstock.errors import InvalidRequest, Unavailable
from penstock.net.addresses import TOKEN_VARIABLE, Token, resource
from penstock.net.blocking import BlockingConnection
from penstock.net.http import HttpAnswer
from penstock.net.retry import Backoff
from penstock.net.tls import client_context
from penstock.protocol.queue_options import LARGEST

__all__ = ["Backoff", "BlockingBrokers", "Line", "Popped", "Settler"]

log = logging.getLogger("penstock.client")

ANSWER_SECONDS = 30.0  # limit of a request, beyond its wait at the broker
JSON = ("Content-Type", "application/json")
POP = operations.POP_ANY
MAX_ACKS = 1000  # in one request
PAUSE_SECONDS = 0.5  # between attempts while no broker answers
ASSUMED_LEASE_SECONDS = 60.0  # lease time if the broker does not name it
Outcome = tuple[Received, str, str | None]  # message, status and reason
_popped = msgspec.json.Decoder(Popped[Received])


class BlockingBrokers:
    """The addresses of the brokers, and which of them is used now. Shared by all lines.

    `token` (default: PENSTOCK_TOKEN), `ca`, `certificate`, `key` and `tls` are those of
    `penstock.Client`. `timeout` is the time limit to connect, in seconds.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: Token | None = None,
        ca: str | None = None,
        certificate: str | None = None,
        key: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout: float = 5.0,
    ) -> None:
        for url in urls:
            check_url(url)
        self.urls = list(urls)
        secure = any(url.startswith("https:") for url in urls)
        self.tls = tls or (client_context(ca, certificate, key) if secure else None)
        self.timeout = timeout
        self.current = 0  # index in `urls` of the broker that answered last
        self._token = token or os.environ.get(TOKEN_VARIABLE) or None

    @property
    def url(self) -> str:
        """Return the address of the broker that is used now."""
        return self.urls[self.current]

    def leave(self, url: str) -> None:
        """Use the next broker, unless that has happened already."""
        if self.url == url:
            self.current = (self.current + 1) % len(self.urls)

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Return the headers that authenticate a request. A token function that fails is tried
        again, as a broker that does not answer.
        """
        try:
            token = self._token() if callable(self._token) else self._token
        except Exception as error:
            raise Unavailable(f"the function that returns the token failed: {error!r}") from error
        return ((("Authorization", f"Bearer {token}")),) if token else ()


class Line:
    """One connection to the broker that is used now. It carries one request at a time."""

    def __init__(self, brokers: BlockingBrokers) -> None:
        self._brokers = brokers
        self._connection = self._new()

    def _new(self) -> BlockingConnection:
        brokers = self._brokers
        return BlockingConnection(brokers.url, tls=brokers.tls, timeout=brokers.timeout)

    def fileno(self) -> int:
        """Return the file descriptor of the socket, -1 when not connected."""
        return self._connection.fileno()

    def send(self, method: str, target: str, body: bytes = b"") -> None:
        """Send a request. Raises `Unavailable` after it has moved on to the next broker."""
        if self._connection.url != self._brokers.url:
            self._connection.close()
            self._connection = self._new()
        try:
            self._connection.send(method, target, body, JSON, *self._brokers.headers())
        except Unavailable:
            self._brokers.leave(self._connection.url)
            raise

    def send_pop(self, sources: Sequence[Mapping[str, Any]], wait: float) -> None:
        """Send a pop over several queues that waits at the broker for `wait` seconds. A source is
        as in the body of `POST /api/v1/pop/any`. `Settler.take` reads the answer.
        """
        self.send(POP.method, POP.path, _pop_body(sources, wait))

    def pop(self, sources: Sequence[Mapping[str, Any]], wait: float = 0.0) -> HttpAnswer:
        """Send a pop over several queues and wait for its answer."""
        return self.ask(POP.method, POP.path, _pop_body(sources, wait), wait=wait)

    def wait(self, timeout: float = 0.0) -> HttpAnswer | None:
        """Wait up to `timeout` seconds for the answer, and return None if it has not arrived by
        then. Raises `Unavailable` like `send`, and what the status of the answer means.
        """
        try:
            answer = self._connection.wait(timeout)
            if answer is not None:
                check(answer)
            return answer
        except Unavailable:
            if not self._connection.stale:
                self._brokers.leave(self._connection.url)
            raise

    def ask(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        retry_for: float = 0.0,
        wait: float = 0.0,
    ) -> HttpAnswer:
        """Send a request that waits at the broker for up to `wait` seconds, and wait for its
        answer. While no broker answers, try all of them again for `retry_for` seconds. The request
        must do no harm if it is sent twice.
        """
        give_up = time.monotonic() + retry_for
        backoff, tried = Backoff(), 0
        while True:
            try:
                self.send(method, target, body)
                answer = self.wait(wait + ANSWER_SECONDS)
                if answer is not None:
                    return answer
                self._connection.close()
                raise Unavailable(f"no answer from {self._connection.url} in time")
            except Unavailable:
                again = self._connection.stale
                self._connection.close()
                if again:
                    continue
                self._brokers.leave(self._connection.url)
                tried += 1
                delay = backoff.delay() if tried % len(self._brokers.urls) == 0 else 0.0
                if tried >= len(self._brokers.urls) and time.monotonic() + delay >= give_up:
                    raise
                time.sleep(delay)

    def json(
        self, method: str, *parts: str, body: Any = None, retry_for: float = 0.0, **query: Any
    ) -> Any:
        """Send a JSON body, return the decoded answer. `parts` and `query` are the target."""
        encoded = b"" if body is None else msgspec.json.encode(body)
        answer = self.ask(method, resource(*parts, **query), encoded, retry_for=retry_for)
        return understood(msgspec.json.decode, answer.body) if answer.body else None

    def abandon(self, timeout: float) -> HttpAnswer | None:
        """Cancel a waiting request. Returns its answer if that was already on its way."""
        answer = self._connection.abandon(timeout)
        return answer if answer is not None and answer.status < 300 else None

    def close(self) -> None:
        """Close the connection. The next request opens another one."""
        self._connection.close()


@dataclass(slots=True)
class KeptLease:
    seconds: float
    due: float  # when to renew it
    open: set[Received] = field(default_factory=set)  # its messages without an outcome


class Settler:
    """Sends the outcomes of messages, and renews their leases until then, in a thread with a
    connection of its own.

    A task may run in the thread that consumes (Celery's solo pool, a callback of kombu). The
    settler still renews its lease, and sends an early acknowledgement before the task runs.
    Outcomes that arrive during a request are sent together in the next one. While no broker
    answers, the settler keeps them, so a task that ends during a restart of the broker does not run
    twice. A forked child has no copy of the thread and needs none: leases belong to the process
    that took them.
    """

    def __init__(self, brokers: BlockingBrokers) -> None:
        self._line = Line(brokers)
        self._changed = threading.Condition()
        self._outcomes: deque[Outcome] = deque()  # not sent yet
        self._sending = 0  # outcomes in the request that is under way
        self._stuck = False  # no broker answers
        self._leases: dict[str, KeptLease] = {}
        self._closed = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def take(self, answer: HttpAnswer) -> Popped[Received]:
        """Return what the answer to a pop brought. The leases of its messages are renewed until
        they are settled.
        """
        if not answer.body:
            return Popped()
        popped = understood(_popped.decode, answer.body)
        seconds = float(answer.headers.get("lease-time") or 0) or ASSUMED_LEASE_SECONDS
        with self._changed:
            for message in popped.messages:
                message.queue = message.queue or popped.queue
                if message.lease_id:
                    self._keep(message, seconds)
        return popped

    def _keep(self, message: Received, seconds: float) -> None:
        lease = self._leases.get(message.lease_id)
        if lease is None:
            lease = KeptLease(seconds, time.monotonic() + seconds / 3)
            self._leases[message.lease_id] = lease
        lease.open.add(message)
        self._run()

    def settle(self, message: Received, status: str, error: str | None = None) -> None:
        """Send the message's outcome soon: completed, retry, failed or dlq."""
        if self._pid != os.getpid():
            return  # a forked child: the parent holds the lease
        with self._changed:
            self._outcomes.append((message, status, error))
            self._run()
            self._changed.notify_all()

    def flush(self, timeout: float) -> None:
        """Wait until the outcomes are at a broker, for at most `timeout` seconds."""
        if self._pid == os.getpid():
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stuck or not (self._outcomes or self._sending), timeout
                )

    def close(self, timeout: float) -> None:
        """Send what is settled, for at most `timeout` seconds, and end the thread."""
        if self._pid != os.getpid() or self._thread is None:
            return
        deadline = time.monotonic() + timeout
        self.flush(timeout)
        with self._changed:
            lost = len(self._outcomes) + self._sending
            self._closed = True
            self._changed.notify_all()
        atexit.unregister(self._close_at_exit)
        self._thread.join(max(0.1, deadline - time.monotonic()))
        if lost:
            log.warning(
                "%d acknowledgements were not sent: their messages will be delivered again", lost
            )

    def _close_at_exit(self) -> None:
        self.close(1.0)

    def _run(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(
                target=self._work, name="penstock acknowledgements", daemon=True
            )
            self._thread.start()
            atexit.register(self._close_at_exit)
        elif self._thread is not None:
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._outcomes, self._pause())
                if self._closed and not self._outcomes:
                    break
                outcomes = self._take_outcomes()
                due = [] if self._closed else self._take_due()
            try:
                if outcomes:
                    self._send(outcomes)
                    outcomes = []
                for lease, seconds in due:
                    self._renew(lease, seconds)
            except Unavailable as error:
                log.warning("acknowledgements wait for a broker: %s", error)
                with self._changed:
                    self._outcomes.extendleft(reversed(outcomes))
                    for name, _ in due:
                        if name in self._leases:
                            self._leases[name].due = 0.0  # renew it as soon as a broker answers
                    self._sending, self._stuck = 0, True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed, PAUSE_SECONDS)
                    if self._closed:
                        break
            # A bug must not end the thread, which renews all leases. The outcomes that were not
            # sent are dropped: their messages are delivered again when the leases expire.
            except Exception:
                log.exception("acknowledgements or renewals have failed")
            else:
                self._stuck = False
            finally:
                with self._changed:
                    self._sending = 0
                    self._changed.notify_all()
        self._line.close()

    def _pause(self) -> float | None:
        """Return the seconds until the next renewal of a lease."""
        if not self._leases:
            return None
        return max(0.0, min(lease.due for lease in self._leases.values()) - time.monotonic())

    def _take_outcomes(self) -> list[Outcome]:
        """Return the next outcomes, all of one group."""
        outcomes: list[Outcome] = []
        group = self._outcomes[0][0].consumer_group if self._outcomes else ""
        while (
            self._outcomes
            and len(outcomes) < MAX_ACKS
            and self._outcomes[0][0].consumer_group == group
        ):
            outcomes.append(self._outcomes.popleft())
        self._sending = len(outcomes)
        for message, _, _ in outcomes:
            lease = self._leases.get(message.lease_id)
            if lease is not None:
                lease.open.discard(message)
                if not lease.open:
                    del self._leases[message.lease_id]
        return outcomes

    def _take_due(self) -> list[tuple[str, float]]:
        now = time.monotonic()
        due = [(name, lease.seconds) for name, lease in self._leases.items() if lease.due <= now]
        for name, seconds in due:
            self._leases[name].due = now + seconds / 3
        return due

    def _send(self, outcomes: list[Outcome]) -> None:
        items: list[dict[str, Any]] = []
        for message, status, error in outcomes:
            item: dict[str, Any] = {
                "transactionId": message.transaction_id,
                "partitionId": message.partition_id,
                "leaseId": message.lease_id,
                "status": status,
            }
            if status == "failed":  # requeued: delivered again at once, without a limit
                item |= {"delay": 0, "maxAttempts": LARGEST}
            items.append(item if error is None else item | {"error": storable(error)})
        body = {"acknowledgments": items, "consumerGroup": outcomes[0][0].consumer_group}
        results = self._line.json("POST", "/api/v1/ack/batch", body=body)
        refused = [result for result in results if not result["success"]]
        if refused:
            log.warning(
                "%d messages will be delivered again, their lease was lost: %s",
                len(refused),
                refused[0].get("error"),
            )

    def _renew(self, lease: str, seconds: float) -> None:
        body = {"seconds": max(1, round(seconds))}
        results = self._line.json("POST", "/api/v1/lease", lease, "extend", body=body)
        if not all(result["success"] for result in results):
            with self._changed:
                lost = self._leases.pop(lease, None)
            if lost is not None and lost.open:
                log.warning("a lease was lost: %d messages will be delivered again", len(lost.open))


def _pop_body(sources: Sequence[Mapping[str, Any]], wait: float) -> bytes:
    body = {"sources": sources, "wait": wait > 0, "timeout": round(wait * 1000)}
    return msgspec.json.encode(body)


def check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise InvalidRequest(f"{url} is not a broker's address: {error}") from None
    if not right:
        raise InvalidRequest(f"{url} is not a broker's address, such as http://127.0.0.1:6632")
