"""Blocking requests to the first of several brokers that answers.

All brokers on one database are equal: a lease that one of them granted can be renewed and settled
at another. So a lost broker is not an error of the framework's connection as long as another one
answers, or the same one comes back, within `retry_for`.
"""

import os
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.client.brokers import understood
from penstock.contract import operations
from penstock.errors import InvalidRequest, Unavailable
from penstock.net.addresses import TOKEN_VARIABLE, Token, resource
from penstock.net.blocking import BlockingConnection
from penstock.net.http import HttpAnswer
from penstock.net.retry import Backoff
from penstock.net.tls import client_context
from penstock.protocol.status import error_from_http

ANSWER_SECONDS = 30.0  # limit of a request, beyond its wait at the broker
JSON = ("Content-Type", "application/json")
POP = operations.POP_ANY


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
        for _ in range(2):
            try:
                self._connection.send(method, target, body, JSON, *self._brokers.headers())
                return
            except Unavailable:
                if not self._connection.stale:
                    self._brokers.leave(self._connection.url)
                    raise
                self._connection.close()  # the broker had closed it while it was idle

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
        except Unavailable:
            if not self._connection.stale:
                self._brokers.leave(self._connection.url)
            raise
        return None if answer is None else self._checked(answer)

    def _checked(self, answer: HttpAnswer) -> HttpAnswer:
        if answer.status < 300:
            return answer
        error = error_from_http(answer.status, answer.body)
        if isinstance(error, Unavailable):
            self._brokers.leave(self._connection.url)
        raise error

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
