"""What a handler sees and returns: Request in, Response or StreamResponse out.

They are msgspec structs because those are built in C: one request costs two of them and little
else. A request shares its head (method, path, parameters, headers) with every other request that
arrived with the same bytes (see `head.py`), so those are read-only.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from penstock.wire.http.head import Head

JSON = "application/json"
Headers = Sequence[tuple[str, str]]
CHALLENGE: Headers = (("WWW-Authenticate", "Bearer"),)  # of a 401

_encode = msgspec.json.Encoder().encode


class Peer(Protocol):
    """The connection a request came on, as far as a request needs it."""

    def watch(self, callback: Callable[[], None]) -> None: ...

    @property
    def address(self) -> str: ...


class Request(msgspec.Struct, eq=False):
    head: "Head"
    body: bytes
    peer: Peer
    args: Any = None  # the decoded query, when the route names a type for it
    data: Any = None  # the decoded body, when the route names a type for it

    @property
    def method(self) -> str:
        return self.head.method

    @property
    def path(self) -> str:
        return self.head.path

    @property
    def params(self) -> Mapping[str, str]:
        """Percent-decoded path parameters."""
        return self.head.params

    @property
    def query(self) -> str:
        """The raw query string, without the question mark."""
        return self.head.query

    @property
    def address(self) -> str:
        """Who sent it: host, or "unix" for a Unix socket."""
        return self.peer.address

    @property
    def subject(self) -> str | None:
        """Who asks, by the token's `sub`; None without a token."""
        identity = self.head.identity
        return None if identity is None else identity.subject

    def header(self, name: str) -> str | None:
        """A header by its lower-case name; several of one name are joined with commas."""
        return self.head.header(name)

    def on_disconnect(self, callback: Callable[[], None]) -> None:
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

EMPTY = Response(204)


def json_response(value: Any, status: int = 200, headers: Headers = ()) -> Response:
    return Response(status, _encode(value), JSON, headers)


def error_response(status: int, text: str, headers: Headers = (), **more: Any) -> Response:
    return json_response({"error": text, **more}, status, headers)
