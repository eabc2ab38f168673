"""Decide about a request from its head alone, once per distinct head.

- Origin: pages of other sites and unknown host names get 403 (`penstock.wire.origins`).
- Type of the body: a route for JSON answers 415 to a clearly different type. A body without a type,
  or with the type that curl sends by default (a form), is taken as JSON.
- Coding: a thread decompresses gzip and zstd before the handler gets the body; others get 415. A
  route with `packed` gets the body as it came.

The result is the endpoint that is cached with the head, so a repeated head costs nothing here.
"""

import asyncio
import copy
from concurrent.futures import Executor

from penstock.errors import Unavailable
from penstock.wire.http.compress import CODINGS, unpack
from penstock.wire.http.messages import Answer, HttpHead, Request, finished
from penstock.wire.http.routes import BoundRoute, HttpRoute, refusing
from penstock.wire.origins import Origins
from penstock.wire.request_memory import RETRY_AFTER_SECONDS, TOO_MANY, RequestMemory

_AS_JSON = frozenset(
    (
        "",
        "application/json",
        "text/json",
        "application/octet-stream",
        "application/x-www-form-urlencoded",  # the default of curl
    )
)
_MAX_HOSTS = 1024
_IDENTITY = frozenset((b"", b"identity"))
_ACCEPTED = (("Accept-Encoding", "gzip, zstd"),)


class Screen:
    def __init__(
        self,
        origins: Origins | None,
        memory: RequestMemory,
        max_body: int,
        executor: Executor | None,
    ) -> None:
        """`origins` None: accept requests from anywhere (a socket between processes)."""
        self._origins = origins
        self._memory = memory
        self._max_body = max_body
        self._executor = executor
        self._hosts: set[bytes | None] = set()  # accepted values of Host; at most _MAX_HOSTS

    def apply(self, head: HttpHead, endpoint: BoundRoute) -> BoundRoute:
        """Return the endpoint after the checks of the head's origin and body."""
        route = endpoint.route
        if self._origins is not None and (head.from_browser or head.host not in self._hosts):
            refusal = self._judge_origin(self._origins, head, route)
            if refusal is None:
                self._allow(head.host)
            elif not route.forwards:
                return refusing(403, refusal)
        if head.length == 0 or route.forwards:
            return endpoint
        if head.media is not None and route.takes_json:
            media = head.media.decode("latin-1").partition(";")[0].strip().lower()
            if media not in _AS_JSON and not media.endswith("+json") and media not in route.media:
                takes = ", ".join(("application/json", *route.media))
                return refusing(415, f"The body is {media[:255]!r}; this takes: {takes}")
        if head.coding is not None and not route.packed:
            coding = head.coding.strip().lower()
            if coding in CODINGS:
                return self._unpacking(endpoint, CODINGS[coding])
            if coding not in _IDENTITY:
                name = coding.decode("latin-1")[:255]
                text = f"Content-Encoding {name!r} is not supported, gzip and zstd are"
                return refusing(415, text, _ACCEPTED)
        return endpoint

    def _allow(self, host: bytes | None) -> None:
        if len(self._hosts) >= _MAX_HOSTS:
            self._hosts.clear()
        self._hosts.add(host)

    def _judge_origin(self, origins: Origins, head: HttpHead, route: HttpRoute) -> str | None:
        host = head.host.decode("latin-1") if head.host is not None else None
        if not head.from_browser:
            return origins.refusal(host, None, None)
        origin = head.header("origin")
        if origin is not None and origins.allows(origin):
            head.cors = f"Access-Control-Allow-Origin: {origin}\r\nVary: Origin\r\n".encode(
                "latin-1"
            )
            head.plain = False
        is_link = (
            route.page
            and head.method in ("GET", "HEAD")
            and head.header("sec-fetch-mode") == "navigate"
            and head.header("sec-fetch-dest") == "document"
        )
        return origins.refusal(host, origin, head.header("sec-fetch-site"), is_link=is_link)

    def _unpacking(self, endpoint: BoundRoute, coding: str) -> BoundRoute:
        async def unpack_and_call(request: Request) -> Answer:
            if endpoint.precheck is not None and endpoint.precheck(request.head) is not None:
                return await finished(endpoint.call(request))  # it refuses the request
            memory = self._memory
            if memory.full:
                raise Unavailable(TOO_MANY, RETRY_AFTER_SECONDS)
            loop = asyncio.get_running_loop()
            body = await loop.run_in_executor(
                self._executor, unpack, request.body, coding, self._max_body
            )
            memory.total += len(body)
            try:
                return await finished(endpoint.call(Request(request.head, body, request.peer)))
            finally:
                memory.total -= len(body)

        unpacking = copy.copy(endpoint)
        unpacking.call = unpack_and_call
        return unpacking
