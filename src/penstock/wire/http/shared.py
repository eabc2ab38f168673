"""What all connections of one server share, and how a failure becomes an answer."""

import asyncio
import logging
import math
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import to_builtins

from penstock.config.schema import HttpServer as Settings
from penstock.metrics import Metrics
from penstock.protocol.ids import uuid7
from penstock.protocol.status import details_of, is_expected, status_of
from penstock.wire.http.encode import Encoder
from penstock.wire.http.head import Head, HeadCache, Refused
from penstock.wire.http.messages import CHALLENGE, Headers, Request, Response, error_response
from penstock.wire.http.routes import Endpoint, Router
from penstock.wire.http.screen import Screen
from penstock.wire.origins import Origins
from penstock.wire.request_memory import RequestMemory

if TYPE_CHECKING:
    from penstock.wire.http.connection import Connection

log = logging.getLogger("penstock.http")

JOINED = 64 << 10  # larger bodies are not copied behind their head


class Limits(NamedTuple):
    """The time limits in seconds; one that is off (0 in the configuration) is infinite."""

    header: float
    body: float
    idle: float
    send: float

    @classmethod
    def of(cls, settings: Settings) -> "Limits":
        times = (
            settings.header_timeout,
            settings.body_timeout,
            settings.idle_timeout,
            settings.send_timeout,
        )
        return cls(*(limit or math.inf for limit in times))


class Shared:
    """What the connections of one server have in common."""

    def __init__(
        self,
        router: Router,
        settings: Settings,
        metrics: Metrics,
        executor: Executor | None,
        origins: Origins | None,
        memory: RequestMemory,
    ) -> None:
        self.router = router
        self.settings = settings
        self.limits = Limits.of(settings)
        self.executor = executor
        self.cache = HeadCache(self._route)
        self.memory = memory
        self._screen = Screen(origins, self.memory, settings.max_body, executor)
        self.encoder = Encoder()
        self.simple_below = min(
            JOINED, settings.compress_from or JOINED
        )  # bytes of a body that needs no thought
        self.connections: set[Connection] = set()
        self.running: set[asyncio.Future[Any]] = set()
        self.draining = False
        self.drained: asyncio.Event = asyncio.Event()
        self.now = 0.0  # the loop's time as of the last sweep
        self.requests = metrics.counter(
            "penstock_http_requests_total", "HTTP answers", "method", "route", "status"
        )
        self.counts = (
            self.requests.values
        )  # added to directly: a call per request would cost more than the counting
        self.refused = metrics.counter(
            "penstock_http_refused_total", "Requests refused as HTTP", "status"
        )
        metrics.gauge(
            "penstock_http_connections", "Open HTTP connections", read=lambda: len(self.connections)
        )

    def _route(self, head: Head) -> None:
        if head.length > self.settings.max_body:
            raise Refused(
                413, f"The body is larger than the limit of {self.settings.max_body} bytes"
            )
        self.router.find(head)
        self._screen.apply(head)

    def labels(self, endpoint: Endpoint, status: int) -> tuple[str, ...]:
        labels = endpoint.labels[status] = (endpoint.route.method, endpoint.name, str(status))
        return labels


def failure(error: BaseException, request: Request | None) -> Response:
    """The answer to an error. What was not raised on purpose is logged under an id, and only the id
    is told.
    """
    status = status_of(error).http
    if is_expected(error):
        wait = getattr(error, "retry_after", None)
        headers: Headers = (
            (("Retry-After", str(max(1, math.ceil(wait)))),) if wait is not None else ()
        )
        if status == 401:
            headers = CHALLENGE
        return error_response(status, str(error), headers, **to_builtins(details_of(error)))
    number = str(uuid7())
    what = f"{request.method} {request.path}" if request is not None else "an answer"
    log.error("internal error %s at %s", number, what, exc_info=error)
    return error_response(500, "internal error", id=number)
