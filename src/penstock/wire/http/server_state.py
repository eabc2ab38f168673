"""State shared by all connections of a server: settings, routes, metrics."""

import asyncio
import math
from concurrent.futures import Executor
from typing import Any, NamedTuple, Protocol

from penstock.config.schema import HttpServerSettings as Settings
from penstock.metrics import Metrics
from penstock.wire.http.encode import Encoder
from penstock.wire.http.head import HeadCache
from penstock.wire.http.messages import HttpHead, MatchedRoute, RequestRefused
from penstock.wire.http.output import JOINED_BYTES
from penstock.wire.http.routes import Router
from penstock.wire.http.screen import Screen
from penstock.wire.origins import Origins
from penstock.wire.request_memory import RequestMemory


class HttpLimits(NamedTuple):
    """Time limits in seconds; a limit that is off (0 in the configuration) is infinite."""

    header: float
    body: float
    idle: float
    send: float


class OpenConnection(Protocol):
    """The methods of a connection that its server calls."""

    def sweep(self, now: float, slack: float) -> None: ...

    def drain(self) -> None: ...

    def abort(self) -> None: ...


class ServerState:
    def __init__(
        self,
        router: Router,
        settings: Settings,
        *,
        metrics: Metrics,
        executor: Executor | None,
        origins: Origins | None,
        memory: RequestMemory,
    ) -> None:
        self.settings = settings
        self.limits = HttpLimits(
            header=settings.header_timeout or math.inf,
            body=settings.body_timeout or math.inf,
            idle=settings.idle_timeout or math.inf,
            send=settings.send_timeout or math.inf,
        )
        self.executor = executor  # for compression, which would block the loop
        self.memory = memory
        self.encoder = Encoder()
        self.cache = HeadCache(self._route)
        self._router = router
        self._screen = Screen(origins, memory, settings.max_body, executor)
        # a body below this size is neither compressed nor too large to copy
        self.simple_below = min(JOINED_BYTES, settings.compress_from or JOINED_BYTES)
        self.connections: set[OpenConnection] = set()
        self.running: set[asyncio.Future[Any]] = set()  # handlers, even if the client has gone
        self.draining = False  # close each connection after the request in flight
        self.drained = asyncio.Event()  # set when the last connection has closed
        self.now = 0.0  # the loop's time as of the last sweep
        self.requests = metrics.counter(
            "penstock_http_requests_total", "HTTP responses", "method", "route", "status"
        )
        # updated in place: a call per request would cost more than the counting
        self.counts = self.requests.sums()
        self.refused = metrics.counter(
            "penstock_http_refused_total",
            "Requests rejected before they reached a route, as invalid HTTP or over a limit",
            "status",
        )
        metrics.gauge(
            "penstock_http_connections", "Open HTTP connections", read=lambda: len(self.connections)
        )

    def _route(self, head: HttpHead) -> None:
        head.endpoint = self._screen.apply(head, self._router.find(head))
        if head.length > self.settings.max_body:
            text = f"The body is larger than the limit of {self.settings.max_body} bytes"
            raise RequestRefused(413, text, head=head)

    def labels(self, endpoint: MatchedRoute, status: int) -> tuple[str, ...]:
        labels = endpoint.labels[status] = (endpoint.method, endpoint.name, str(status))
        return labels
