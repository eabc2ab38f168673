"""What the Console asks beyond the API that everybody uses: figures that are sampled while somebody
watches, lists that the server filters and sorts, the effective configuration and recent log lines.
"""

import asyncio
import logging
from collections import deque
from importlib.resources import files
from pathlib import Path

import msgspec

from penstock.broker import Broker
from penstock.config import Loaded, show
from penstock.contract import operations
from penstock.contract.noun import of
from penstock.contract.queries import QueueListQuery, RecentQuery
from penstock.contract.queues import Queue, QueueDetails, QueuePage
from penstock.errors import InvalidRequest, NotFound
from penstock.io.tasks import slices
from penstock.monitor import Sampler
from penstock.monitor.figures import WatchedQueue
from penstock.monitor.search import FoundThing, Search
from penstock.wire.auth import Role
from penstock.wire.http.messages import Request, Response, Stream, StreamResponse
from penstock.wire.http.routes import HttpRoute, route, serves
from penstock.wire.http.static import static_routes
from penstock.wire.sse import HEADERS

KEPT_LINES = 1000  # of the log
QUEUES_PER_SLICE = 250  # rows made before others get a turn
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class LogQuery(msgspec.Struct):
    level: str = "warning"
    limit: int = 200


class ConfigKey(msgspec.Struct):
    key: str
    value: str  # *** for a secret
    origin: str  # default, or where it was given
    default: bool


class ConfigKeys(msgspec.Struct):
    keys: list[ConfigKey]


class Me(msgspec.Struct):
    subject: str | None
    role: str
    authentication: bool


class FindQuery(msgspec.Struct):
    q: str = ""


class FoundThings(msgspec.Struct):
    found: list[FoundThing]


class LogLine(msgspec.Struct):
    at: float  # milliseconds since 1970
    level: str
    logger: str
    message: str


class LogLines(msgspec.Struct):
    lines: list[LogLine]  # the newest first


class RecentLines(logging.Handler):
    """The last log lines, in memory."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[tuple[float, int, str, str]] = deque(maxlen=KEPT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.created, record.levelno, record.name, record.getMessage()))

    def newest(self, level: int, limit: int) -> list[LogLine]:
        lines = [line for line in reversed(self._lines) if line[1] >= level][:limit]
        return [
            LogLine(at * 1000, logging.getLevelName(number).lower(), name, text)
            for at, number, name, text in lines
        ]


_LINES = RecentLines()


class ConsoleApi:
    tag = "internal"

    def __init__(self, broker: Broker, *, authentication: bool) -> None:
        self._broker = broker
        self._authentication = authentication
        logging.getLogger("penstock").addHandler(_LINES)  # once per process, however often asked
        self._sampler = Sampler(broker)
        self._search = Search(broker, self._sampler)
        self._rows: tuple[float, list[Queue]] = (0.0, [])  # of when, for all who list them

    @route("GET", "/api/v1/me")
    def me(self, request: Request) -> Me:
        """The caller's identity and role."""
        identity = request.head.identity
        role = identity.role.name.lower() if identity else "admin"
        return Me(request.subject, role, self._authentication)

    @route("GET", "/api/v1/live", answer_type="text/event-stream")
    def live(self, _: Request) -> StreamResponse:
        """Follow the broker's state as server-sent events, about once a second."""

        async def run(stream: Stream) -> None:
            events: asyncio.Queue[bytes] = asyncio.Queue(maxsize=2)  # a slow viewer misses some

            missed = False

            def seen(event: bytes) -> None:
                nonlocal missed
                if events.full():
                    missed = True
                else:
                    events.put_nowait(self._sampler.whole() if missed else event)
                    missed = False

            stop = self._sampler.watch(seen)
            try:
                stream.write_now(await self._sampler.snapshot())
                while True:
                    if not stream.write_now(await events.get()):
                        await stream.drained()
            finally:
                stop()

        return StreamResponse(run, content_type="text/event-stream", headers=HEADERS, live=True)

    @serves(operations.LIST_QUEUES)
    async def queues(self, args: QueueListQuery) -> QueuePage:
        await self._sampler.fresh(recent=args.recent)
        if self._rows[0] != self._sampler.queues_at:
            at, queues = self._sampler.queues_at, list(self._sampler.queues.values())
            rows = [
                _row(queue, self._sampler)
                async for some in slices(queues, QUEUES_PER_SLICE)
                for queue in some
            ]
            self._rows = (at, rows)
        # There may be many to sort: beside the event loop.
        return QueuePage(*await asyncio.to_thread(args.page, self._rows[1]))

    @serves(operations.GET_QUEUE)
    async def queue(self, queue: str, args: RecentQuery) -> QueueDetails:
        await self._sampler.fresh(recent=args.recent)
        watched = self._sampler.queues.get(queue)
        info = await self._broker.queues.catalog.queue(queue)
        if watched is None or info is None:
            raise NotFound(f"queue '{queue}' does not exist")
        return of(
            QueueDetails,
            _row(watched, self._sampler),
            groups=watched.groups,
            options=info.options,
            created_at=info.created_at,
        )

    @route("GET", "/api/v1/search")
    async def search(self, args: FindQuery) -> FoundThings:
        """Find queues, groups, topics, routes, schedules and pipelines by a part of their name, and
        messages by their transaction id.
        """
        await self._sampler.fresh(recent=True)
        return FoundThings(await self._search.find(args.q))

    @route("GET", "/api/v1/config", role=Role.ADMIN)
    def config(self) -> ConfigKeys:
        """The effective configuration and the source of each value; secrets are hidden."""
        rows = show(Loaded(self._broker.config, self._broker.origins, []))
        return ConfigKeys([ConfigKey(*row, default=row[2] == "default") for row in rows])

    @route("GET", "/api/v1/logs", role=Role.ADMIN)
    def logs(self, args: LogQuery) -> LogLines:
        """Recent log lines."""
        level = logging.getLevelNamesMapping().get(args.level.upper())
        if level is None:
            raise InvalidRequest("level is info, warning or error")
        return LogLines(_LINES.newest(level, min(args.limit, KEPT_LINES)))


def console_routes() -> list[HttpRoute]:
    """Return the routes of the pages. They are public: they load data with the viewer's token."""
    directory = Path(str(files("penstock.wire.console")))
    policy = (("Content-Security-Policy", POLICY), ("Referrer-Policy", "no-referrer"))
    docs = Response(302, b"", "", (("Location", "console/docs.html"),))
    return [
        *static_routes("/console", directory, headers=policy, role=Role.PUBLIC),
        HttpRoute("GET", "/docs", lambda _: docs, hidden=True, page=True),
    ]


def _row(queue: WatchedQueue, sampler: Sampler) -> Queue:
    history = sampler.line_of(queue.figures.name)
    return of(Queue, queue.figures, queue, groups=len(queue.groups), history=history)
