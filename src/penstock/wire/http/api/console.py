"""What the Console asks beyond the API that everybody uses: figures that are sampled while somebody
watches, lists that the server filters and sorts, the effective configuration and recent log lines.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import Any

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
from penstock.queues.admin.figures import ORDERS
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
        # The queues of the last sample as they were last sorted, for the next page.
        self._sorted: tuple[tuple[float, str, str], list[WatchedQueue]] = ((0.0, "", ""), [])

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
        field = args.field_of(Queue)
        if args.cursor is not None and field != "name":
            raise InvalidRequest("cursor: only a listing by name has one; read on with offset")
        sampled = args.recent and self._sampler.watched and args.cursor is None
        if sampled or field not in ("name", *ORDERS):
            return await self._sampled_page(args, field)
        figures, words, desc = self._broker.queues.figures, args.filter, args.descending
        limit, offset = args.bounds
        following = None
        if field == "name":
            found = await figures.by_name(words, limit, offset, args.cursor, descending=desc)
            ids = [number for number, _ in found]
            following = found[-1][1] if len(found) == limit else None
        else:
            ids = await figures.by_figure(field, words, limit, offset, descending=desc)
        queues = await self._sampler.read(ids)
        return QueuePage(await self._rows(queues), await figures.count(words), following)

    async def _sampled_page(self, args: QueueListQuery, field: str) -> QueuePage:
        """Return a page from the last sample of all queues, which is there while somebody watches.
        Only a sample of all queues has rates and ages to sort by.
        """
        await self._sampler.fresh(recent=args.recent)
        order = self._sampler.queues_at, args.filter, args.sort
        if self._sorted[0] != order:
            queues = list(self._sampler.queues.values())
            # There may be many to sort: beside the event loop.
            name = attrgetter("figures.name")
            arranged = await asyncio.to_thread(args.arrange, queues, name, _figure(field))
            self._sorted = order, arranged
        matching = self._sorted[1]
        return QueuePage(await self._rows(args.cut(matching)), len(matching))

    async def _rows(self, queues: list[WatchedQueue]) -> list[Queue]:
        return [
            _row(queue, self._sampler)
            async for some in slices(queues, QUEUES_PER_SLICE)
            for queue in some
        ]

    @serves(operations.GET_QUEUE)
    async def queue(self, queue: str, args: RecentQuery) -> QueueDetails:
        info = await self._broker.queues.catalog.queue(queue)
        watched = None
        if info is not None and args.recent and self._sampler.watched:
            watched = self._sampler.queues.get(queue)
        elif info is not None:
            consumers = await self._broker.queues.consumers.members()
            watched = next(iter(await self._sampler.read([info.id], consumers)), None)
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
    return of(Queue, queue.figures, queue, groups=len(queue.groups), history=sampler.line_of(queue))


def _figure(field: str) -> Callable[[WatchedQueue], Any]:
    """Return a function that returns a field of `Queue`, without making the whole row."""
    if field == "groups":
        return lambda queue: len(queue.groups)
    return attrgetter(field if hasattr(WatchedQueue, field) else f"figures.{field}")
