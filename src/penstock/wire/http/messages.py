"""What a handler sees and returns: Request in, Response or StreamResponse out.

They are msgspec structs because those are built in C: one request costs two of them and little
else. A request shares its head (method, path, parameters, headers) with every other request that
arrived with the same bytes (see `head.py`), so those are read-only.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from penstock.protocol.ids import uuid7
from penstock.protocol.status import details_of, is_expected, status_of
from penstock.wire.auth import Identity

log = logging.getLogger("penstock.http")

CHUNKED = -1  # the length of a body that says its end itself
JSON = "application/json"
UNIX = "unix"  # the address of a peer that connected by a Unix socket
CLIENT_HEADER = "x-forwarded-for"  # believed from such a peer only
Headers = Sequence[tuple[str, str]]
CHALLENGE: Headers = (("WWW-Authenticate", "Bearer"),)  # of a 401

_encode = msgspec.json.Encoder().encode


class RequestRefused(Exception):
    """The request cannot be served as HTTP; it is answered with `status` and the connection is
    closed.
    """

    def __init__(
        self, status: int, text: str, headers: Headers = (), head: "HttpHead | None" = None
    ) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers
        self.head = head  # of the request, if its route is known


class MatchedRoute(Protocol):
    """What answers a head, as far as a connection needs it."""

    method: str  # of its route
    name: str  # its route's path
    gzip: bool  # a large answer may be compressed
    labels: dict[int, tuple[str, ...]]  # of the request counter, by status
    call: "Handler"
    precheck: "Precheck | None"  # asked before a long body is received
    write_error: "ErrorWriter | None"  # of a protocol with errors of its own; None: JSON


class HttpHead:
    """Request line and headers; what the head alone decides is decided once and kept with it."""

    __slots__ = (
        "_by_name", "accepts_gzip", "args", "coding", "cors", "endpoint", "expects_continue",
        "from_browser", "headers", "host", "http10", "identity", "keep_alive", "length", "media",
        "method", "params", "path", "plain", "query", "target", "token",
    )  # fmt: skip

    def __init__(
        self, method: str, target: str, location: str, headers: list[tuple[bytes, bytes]]
    ) -> None:
        """`target` is what was sent, `location` its path and query."""
        self.method = method
        self.target = target
        self.headers = headers  # names in lower case
        self.path, _, self.query = location.partition("?")  # as they came
        self.length = 0  # of the body; CHUNKED when it says its end itself
        self.keep_alive = False  # another request may follow on the connection
        self.http10 = False
        self.expects_continue = False  # the client waits for 100 before it sends the body
        self.accepts_gzip = False
        self.host: bytes | None = None
        self.media: bytes | None = None  # the type of the body
        self.coding: bytes | None = None  # its Content-Encoding
        self.from_browser = False  # it has a header by which browsers say where it comes from
        self.cors = b""  # lines of the answer that let the page of another origin read it
        self.params: Mapping[str, str] = {}
        self.endpoint: MatchedRoute  # set by the router
        self.args: Any = None  # the decoded query, kept only when its type is frozen
        self.plain = False  # HTTP/1.1, kept alive, not HEAD: the answer's head has no special lines
        self._by_name: dict[str, str] | None = None
        self.token: str | None = None  # the bearer token, once someone asked for it
        self.identity: Identity | None = None  # whose it is; None while authentication is off

    def header(self, name: str) -> str | None:
        if self._by_name is None:
            self._by_name = {}
            for raw_name, raw_value in self.headers:
                key, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
                before = self._by_name.get(key)
                self._by_name[key] = value if before is None else f"{before}, {value}"
        return self._by_name.get(name)


class Peer(Protocol):
    """The connection a request came on, as far as a request needs it."""

    def watch(self, callback: Callable[[], object]) -> None: ...

    @property
    def address(self) -> str: ...

    @property
    def closed(self) -> bool: ...


class Request(msgspec.Struct, eq=False):
    head: HttpHead
    body: bytes
    peer: Peer
    args: Any = None  # the decoded query, when the route names a type for it
    data: Any = None  # the decoded body, when the route names a type for it

    @property
    def params(self) -> Mapping[str, str]:
        """Return the percent-decoded path parameters."""
        return self.head.params

    @property
    def address(self) -> str:
        """Return the client's host. Only processes of this broker connect by a Unix socket; one
        that forwards a request names its client.
        """
        address = self.peer.address
        return self.head.header(CLIENT_HEADER) or address if address == UNIX else address

    @property
    def subject(self) -> str | None:
        """Return the token's `sub`; None without a token."""
        identity = self.head.identity
        return None if identity is None else identity.subject

    @property
    def who(self) -> str:
        """Return who sent the request, for records: the token's subject, or else the address."""
        return self.subject or self.address

    def header(self, name: str) -> str | None:
        """Return a header by its lower-case name; several of one name are joined with commas."""
        return self.head.header(name)

    def on_disconnect(self, callback: Callable[[], object]) -> None:
        """Have `callback` called once if the client goes away before the answer."""
        self.peer.watch(callback)


class Response(msgspec.Struct, eq=False, gc=False):
    status: int = 200
    body: bytes | memoryview = b""
    content_type: str = JSON
    headers: Headers = ()


class Stream(Protocol):
    async def write(self, data: bytes) -> None:
        """Send a piece; returns when the client has taken enough of what came before."""

    def write_now(self, data: bytes) -> bool:
        """Send a piece without waiting; False: nothing more before `drained` (nor ever, once the
        client is gone).
        """

    async def drained(self) -> None:
        """Return when the client has taken enough; ConnectionResetError when it is gone."""


class StreamResponse(msgspec.Struct, eq=False):
    """An answer of unknown length: `run` writes it piece by piece.

    `run` is cancelled when the client goes away. When the server stops, a `live` stream (one that
    never ends by itself, such as server-sent events) is ended at once; any other is given the drain
    time to finish.
    """

    run: Callable[[Stream], Awaitable[None]]
    content_type: str = "application/octet-stream"
    headers: Headers = ()
    status: int = 200
    live: bool = False


Answer = Response | StreamResponse
Handler = Callable[[Request], Answer | Awaitable[Answer]]
Precheck = Callable[[HttpHead], RequestRefused | None]  # a refusal, from the head alone
ErrorWriter = Callable[[HttpHead, int, str, Headers], Response]  # of a status, a text, and headers

EMPTY = Response(204)


async def finished(answer: Answer | Awaitable[Answer]) -> Answer:
    """Return a handler's answer, at once or when it is ready."""
    return answer if isinstance(answer, Answer) else await answer


def json_response(value: Any, status: int = 200, headers: Headers = ()) -> Response:
    return Response(status, _encode(value), JSON, headers)


def refusal_response(
    head: HttpHead | None, status: int, text: str, headers: Headers = (), **more: Any
) -> Response:
    """Return an error in the protocol of the requested route; `more` are fields for our own."""
    if head is None or head.endpoint.write_error is None:
        return error_response(status, text, headers, **more)
    return head.endpoint.write_error(head, status, text, headers)


def error_response(status: int, text: str, headers: Headers = (), **more: Any) -> Response:
    return json_response({"error": text, **more}, status, headers)


def failure_response(error: BaseException, request: Request | None) -> Response:
    """Return the answer to an error. An unexpected error is logged with an id; the answer contains
    only the id.
    """
    status = status_of(error).http
    head = request.head if request is not None else None
    if is_expected(error):
        wait = getattr(error, "retry_after", None)
        headers: Headers = (
            (("Retry-After", str(max(1, math.ceil(wait)))),) if wait is not None else ()
        )
        if status == 401:
            headers = CHALLENGE
        details = msgspec.to_builtins(details_of(error))
        return refusal_response(head, status, str(error), headers, **details)
    number = str(uuid7())
    what = f"{head.method} {head.path}" if head is not None else "an answer"
    log.error("internal error %s at %s", number, what, exc_info=error)
    return refusal_response(head, 500, "internal error", id=number)
