"""Listen for WebSocket connections (wss if a certificate is configured)."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any

from picows import (
    WSListener,
    WSUpgradeRequest,
    WSUpgradeResponse,
    WSUpgradeResponseWithListener,
    ws_create_server,
)

from penstock.config.schema import WebsocketServerSettings as Settings
from penstock.errors import PenstockError, Unavailable
from penstock.metrics import Counter, Metrics
from penstock.protocol.status import status_of
from penstock.topics.store import TopicStore
from penstock.wire.auth import Identity, Role, Verifier
from penstock.wire.auth.verifier import UnknownKey, bearer
from penstock.wire.feed import Feeds
from penstock.wire.origins import Origins
from penstock.wire.request_memory import RequestMemory
from penstock.wire.tls_server import finish_all
from penstock.wire.websocket.session import Session

log = logging.getLogger("penstock.websocket")

READ_BUFFER_BYTES = 4096  # initial size per connection; it grows with the messages
HANDSHAKE_SECONDS = 10.0


class PicowsLog(logging.LoggerAdapter[logging.Logger]):
    """The log of picows. It calls `error` if a client violates the protocol, which is only counted.
    Failures of the broker are logged with `exception`.
    """

    def __init__(self, protocol_errors: Counter) -> None:
        super().__init__(logging.getLogger("picows.server"))
        self._protocol_errors = protocol_errors

    def error(self, msg: object, *args: object, **kwargs: Any) -> None:
        self._protocol_errors.add()
        log.debug(msg, *args, **kwargs)


class WebsocketServer:
    def __init__(
        self,
        settings: Settings,
        topics: TopicStore,
        feeds: Feeds,
        metrics: Metrics,
        *,
        tls: ssl.SSLContext | None = None,
        verifier: Verifier | None = None,
        origins: Origins | None = None,
        memory: RequestMemory | None = None,
    ) -> None:
        """Create the server. `origins` are the web pages that may connect; None allows all.

        `memory` is the limit for all requests of the process; None: no limit.
        """
        self.topics = topics
        self.feeds = feeds
        self.max_message = settings.max_message
        self.memory = memory or RequestMemory()
        self.received = 0  # messages
        self._settings = settings
        self._tls = tls  # None: plain text
        self._verifier = verifier  # None: authentication is off
        self._origins = origins
        self._learning: set[asyncio.Task[Identity]] = set()  # fetches of keys for tokens
        self.sessions: dict[Session, Callable[[], None]] = {}  # the function ends its keep-alive
        self._ended = asyncio.Event()  # set when a session ends
        self._server: asyncio.Server | None = None
        self._refused = metrics.counter(
            "penstock_websocket_connections_refused_total",
            "WebSocket connections refused because there were too many",
        )
        self._protocol_errors = metrics.counter(
            "penstock_websocket_protocol_errors_total",
            "WebSocket connections closed because of a frame that is not allowed",
        )
        metrics.gauge(
            "penstock_websocket_connections",
            "Open WebSocket connections",
            read=lambda: len(self.sessions),
        )
        metrics.gauge(
            "penstock_websocket_messages", "WebSocket messages received", read=lambda: self.received
        )

    @property
    def port(self) -> int:
        if self._server is None:
            raise RuntimeError("the WebSocket server is not started")
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        self._server = await ws_create_server(
            self._listener,
            self._settings.host,
            self._settings.port,
            ssl=self._tls,
            backlog=1024,
            max_frame_size=self._settings.max_message,
            read_buffer_init_size=READ_BUFFER_BYTES,
            websocket_handshake_timeout=HANDSHAKE_SECONDS,
            logger_name=PicowsLog(self._protocol_errors),
        )
        log.info(
            "WebSocket on %s:%d%s", self._settings.host, self.port, " with TLS" if self._tls else ""
        )

    async def stop(self, timeout: float = 10.0) -> None:
        """Accept no connections, answer open requests within `timeout` seconds, and close."""
        if self._server is None:
            return
        self._server.close()
        if late := await finish_all(self.sessions, self._ended, timeout):
            log.warning("%d WebSocket connections were cut off", late)
        self._server = None

    def _listener(self, request: WSUpgradeRequest) -> WSListener | WSUpgradeResponseWithListener:
        if len(self.sessions) >= self._settings.max_connections:
            self._refused.add()
            return _refusal(503, "too many connections")
        if self._origins is not None:
            headers = request.headers
            refusal = self._origins.refusal(
                headers.get("Host"), headers.get("Origin"), headers.get("Sec-Fetch-Site")
            )
            if refusal is not None:
                return _refusal(403, refusal)
        if self._verifier is None:
            return Session(self)
        try:
            return Session(self, self._identify(self._verifier, request))
        except PenstockError as error:
            return _refusal(status_of(error).http, str(error))

    def _identify(self, verifier: Verifier, request: WSUpgradeRequest) -> Identity:
        """Return the identity of the token in the header, or of `access_token` in the query, since
        browsers cannot send headers for WebSockets.
        """
        query = request.path.decode("latin-1").partition("?")[2]
        token = bearer(request.headers.get("Authorization"), query)
        try:
            identity = verifier.identify(token)
        except UnknownKey:
            task = asyncio.create_task(verifier.learn(token))
            self._learning.add(task)
            task.add_done_callback(self._learned)
            raise Unavailable("The token's key is being looked up, try again") from None
        identity.require(Role.READ_ONLY)
        return identity

    def _learned(self, task: "asyncio.Task[Identity]") -> None:
        self._learning.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved; the client gets it at its next attempt

    def opened(self, session: Session) -> None:
        self.sessions[session] = self.feeds.keep_alive.add(session)

    def lost(self, session: Session) -> None:
        self._ended.set()
        stop = self.sessions.pop(session, None)
        if stop is not None:
            stop()


def _refusal(status: int, text: str) -> WSUpgradeResponseWithListener:
    return WSUpgradeResponseWithListener(
        WSUpgradeResponse.create_error_response(status, text.encode()), None
    )
