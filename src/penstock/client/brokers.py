"""HTTP requests to the first of several brokers that answers.

All brokers on one database are equal, so any of them can serve any request. We stay with the one
that answered last: its connections are warm. When an answer closes its connection the broker is
about to stop, and the next request goes to the next one. When it cannot be reached, breaks off,
says 503 or has no room we go to the next as well, and after a round without success we wait a
little longer each time, until `retry_for` is used up. Each is asked once in any case: a frozen
broker may use up all of that time by itself.

What a second attempt may do is the caller's knowledge: `again=True` says that sending the request
twice does no harm (a push carries transaction ids, a second ack changes nothing). Without it a
request is repeated only when it certainly was not acted upon: the connection could not be made, or
the broker answered that it did nothing.
"""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from penstock.contract.broker import BrokerStatus
from penstock.contract.operation import Operation
from penstock.errors import InvalidRequest, PenstockError, StorageFull, Unavailable
from penstock.net.addresses import Token, resource
from penstock.net.http import CannotConnect, HttpAnswer, HttpClient
from penstock.net.retry import Backoff
from penstock.protocol.status import NOT_JSON, error_from_http

_JSON = (("Content-Type", "application/json"),)
T = TypeVar("T")
_status = msgspec.json.Decoder(BrokerStatus)


class Brokers:
    """The brokers of one client. Made and used on one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: Token | None = None,
        timeout: float = 30.0,
        retry_for: float = 30.0,
        pool_size: int = 64,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not urls:
            raise InvalidRequest("at least one broker URL is needed")
        self._token = token if callable(token) else None
        headers = [("Authorization", f"Bearer {token}")] if token and not callable(token) else []
        self.urls = list(urls)
        self.timeout, self.retry_for = timeout, retry_for
        self._clients = [
            HttpClient(url, headers=headers, pool_size=pool_size, tls=tls) for url in urls
        ]
        self._current = 0
        self._loop: asyncio.AbstractEventLoop | None = None  # the one of the first request
        self.closed = False

    async def ask(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        *,
        again: bool = False,
        timeout: float | None = None,
        retry_for: float | None = None,
        polling: bool = False,
    ) -> HttpAnswer:
        """Return the answer of the first broker that answers. A 4xx status raises its error class.

        `timeout` limits each attempt, `retry_for` the time after which no new attempt is made. A
        `polling` request is meant to take long: `retry_for` then counts from the first failure.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise InvalidRequest(
                    "this client belongs to another event loop: make one for each loop"
                )
            self._loop = loop
        clock = loop.time
        retry_for = self.retry_for if retry_for is None else retry_for
        give_up = float("inf") if polling else clock() + retry_for
        backoff = Backoff()
        tried = 0
        while True:
            if self.closed:
                raise Unavailable("the client is closed")
            place = self._current
            try:
                answer = await self._clients[place].request(
                    method,
                    target,
                    body,
                    self._headers(body),
                    timeout or self.timeout,
                    idempotent=again,
                )
                if answer.status < 500:
                    if answer.headers.get("connection") == "close":  # it is about to stop
                        self._leave(place)
                    return answer
                failure: PenstockError = error_from_http(answer.status, answer.body)
                certain = answer.status in (503, 507)  # the broker says that it did nothing
            except TimeoutError as error:
                failure, certain = Unavailable(str(error)), False
            except Unavailable as error:
                failure, certain = error, isinstance(error, CannotConnect)
            if not (again or certain):
                raise failure
            self._leave(place)
            tried += 1
            give_up = min(give_up, clock() + retry_for)
            wait = backoff.delay() if tried % len(self._clients) == 0 else 0.0
            if tried >= len(self._clients) and (
                clock() + wait >= give_up or isinstance(failure, StorageFull)
            ):
                raise failure
            await asyncio.sleep(wait)

    async def statuses(self) -> list[tuple[str, BrokerStatus | PenstockError]]:
        """Return what each broker says of its health, also brokers without their database."""

        async def one(url: str, client: HttpClient) -> tuple[str, BrokerStatus | PenstockError]:
            try:
                answer = await client.request(
                    "GET", "/health", b"", self._headers(b""), self.timeout, idempotent=True
                )
                if answer.status not in (200, 503):
                    check(answer)
                return url, understood(_status.decode, answer.body)
            except TimeoutError as error:
                return url, Unavailable(str(error))
            except PenstockError as error:
                return url, error

        return await asyncio.gather(*map(one, self.urls, self._clients))

    def _leave(self, place: int) -> None:
        """Send the next request to the next broker."""
        if place == self._current:  # otherwise another request has done so already
            self._current = (place + 1) % len(self._clients)

    def _headers(self, body: bytes) -> tuple[tuple[str, str], ...]:
        headers = _JSON if body else ()
        return (*headers, ("Authorization", f"Bearer {self._token()}")) if self._token else headers

    async def call(
        self,
        operation: Operation[T],
        *names: str,
        body: Any = None,
        timeout: float | None = None,
        retry_for: float | None = None,
        **query: Any,
    ) -> T:
        """Call an operation with a JSON body, and decode its answer. `names` are the parameters of
        its path, in order; query parameters of None are left out.
        """
        answer = await self.ask(
            operation.method,
            resource(operation.at(*names), **query),
            b"" if body is None else msgspec.json.encode(body),
            again=operation.repeatable,
            timeout=timeout,
            retry_for=retry_for,
        )
        check(answer)
        kind = operation.answer
        return understood(lambda text: msgspec.json.decode(text, type=kind), answer.body or b"null")

    async def close(self) -> None:
        self.closed = True
        for client in self._clients:
            await client.close()


def understood(decode: Callable[[bytes], T], body: bytes) -> T:
    """Decode a body. Raises `Unavailable` if it is not from a broker but from a proxy."""
    try:
        return decode(body)
    except NOT_JSON as error:
        raise Unavailable(f"the answer is not a broker's: {error}") from error


def check(answer: HttpAnswer) -> None:
    """Raise the error that an unsuccessful status means."""
    if answer.status >= 300:
        raise error_from_http(answer.status, answer.body)
