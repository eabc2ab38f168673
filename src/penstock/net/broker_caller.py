"""A blocking caller of a broker over HTTP, for commands and for Spark's processes.

It has one keep-alive connection, no event loop and no threads. With `patience` it repeats a request
after a temporary failure (a broker that restarts, a database that is down), so the request must be
safe to repeat. `repeated` is set if the last request was repeated: its first answer may be lost.
"""

import http.client
import os
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import msgspec

from penstock.errors import ConnectionLost, InvalidRequest, PenstockError, Unavailable
from penstock.net.addresses import TOKEN_VARIABLE, Token, basic_authorization
from penstock.net.http import CannotConnect
from penstock.net.retry import Backoff
from penstock.net.tls import client_context, explain
from penstock.protocol.status import MAY_PASS, NOT_JSON, error_from_http

CONNECT_SECONDS = 5.0


class BrokerAnswer(NamedTuple):
    status: int
    body: bytes


class BrokerCaller:
    """Call one broker, one request at a time. Close it, or use it as a context manager."""

    def __init__(
        self,
        url: str,
        *,
        token: Token | None = None,
        ca: str | None = None,
        timeout: float = 30.0,
        patience: float = 0.0,
    ) -> None:
        """Limit each attempt by `timeout`, and start no attempt after `patience` seconds.

        Without a token, PENSTOCK_TOKEN is used, if set. `ca`: a PEM file or its text.
        """
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(
                f"{url!r} is not the URL of a broker: write it like http://host:6632"
            )
        self.url = url
        self._host = parts.hostname
        self._prefix = parts.path.rstrip("/")
        self._token = token or os.environ.get(TOKEN_VARIABLE)
        self._basic = basic_authorization(parts)
        self._timeout = timeout
        self._patience = patience
        self._connection = (
            http.client.HTTPSConnection(self._host, port, context=client_context(ca))
            if parts.scheme == "https"
            else http.client.HTTPConnection(self._host, port)
        )
        self.repeated = False  # the last request was sent more than once

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def json(
        self, method: str, path: str, value: Any = None, *, timeout: float | None = None
    ) -> Any:
        """Send a JSON body and return the decoded answer; None if the answer is empty."""
        body = self.call(
            method, path, b"" if value is None else msgspec.json.encode(value), timeout=timeout
        )
        try:
            return msgspec.json.decode(body) if body else None
        except NOT_JSON as error:
            raise Unavailable(f"the answer of {self.url} is not a broker's: {error}") from error

    def call(
        self, method: str, path: str, body: bytes = b"", *, timeout: float | None = None
    ) -> bytes:
        """Return the body of a successful answer. Raise the error of any other answer."""
        deadline = time.monotonic() + self._patience
        backoff = Backoff()
        self.repeated = False
        while True:
            try:
                answer = self.attempt(method, path, body, timeout=timeout)
                if answer.status < 300:
                    return answer.body
                failure: PenstockError = error_from_http(*answer)
                if not isinstance(failure, MAY_PASS):
                    raise failure
            except Unavailable as error:
                failure = error
            delay = backoff.delay()
            if time.monotonic() + delay > deadline:
                raise failure
            time.sleep(delay)
            self.repeated = True

    def events(self, path: str) -> Iterator[Any]:
        """Yield server-sent events with JSON as they arrive, until the broker ends the stream.

        The connection cannot be used afterwards.
        """
        try:
            with self._answer("GET", path, b"", None) as answer:
                if answer.status >= 300:
                    raise error_from_http(answer.status, answer.read())
                while line := answer.readline():
                    if line.startswith(b"data: "):
                        yield msgspec.json.decode(line[6:])
        except NOT_JSON as error:
            raise Unavailable(f"the answer of {self.url} is not a broker's: {error}") from error
        finally:
            self._connection.close()

    def attempt(
        self, method: str, path: str, body: bytes = b"", *, timeout: float | None = None
    ) -> BrokerAnswer:
        """Send a request once and return the answer with any status.

        Raises `CannotConnect` if nothing was sent, `ConnectionLost` if the broker may have executed
        the request, and `InvalidRequest` for a permanent TLS error.
        """
        with self._answer(method, path, body, timeout) as answer:
            return BrokerAnswer(answer.status, answer.read())

    @contextmanager
    def _answer(
        self, method: str, path: str, body: bytes, timeout: float | None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield the answer. Keep the connection if its body is read in full."""
        connection, seconds = self._connection, self._timeout if timeout is None else timeout
        if connection.sock is None:
            self._connect(min(seconds, CONNECT_SECONDS))
        connection.sock.settimeout(seconds)
        headers = {"Content-Type": "application/json"} if body else {}
        if token := self._token() if callable(self._token) else self._token:
            headers["Authorization"] = f"Bearer {token}"
        elif self._basic:
            headers["Authorization"] = self._basic
        try:
            connection.request(method, self._prefix + path, body or None, headers)
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            why = explain(error) or type(error).__name__
            if type(error) is http.client.BadStatusLine:
                why = "it does not speak HTTP: is this the broker's HTTP port?"
            raise ConnectionLost(f"the broker at {self.url} does not answer: {why}") from error
        except BaseException:  # interrupted: the rest of the answer would precede the next one
            connection.close()
            raise

    def _connect(self, seconds: float) -> None:
        self._connection.timeout = seconds
        try:
            self._connection.connect()
        except ssl.SSLError as error:
            self._connection.close()
            raise InvalidRequest(f"{self.url}: {explain(error)}") from error
        except OSError as error:
            self._connection.close()
            raise CannotConnect(f"no broker answers at {self.url}: {explain(error)}") from error
