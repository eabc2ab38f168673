"""Export routes over HTTP.

An answer with records ends at ANSWER_BYTES, however many were asked for; `next` is the `offset` of
the following one.
"""

import base64
from bisect import bisect_right
from itertools import accumulate
from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, convert
from msgspec.json import Decoder

from penstock.errors import InvalidRequest
from penstock.export.manager import Exports
from penstock.export.routes import Route
from penstock.wire.auth import Role
from penstock.wire.http.messages import EMPTY, Request, Response, json_response
from penstock.wire.http.routes import Audited, route

ANSWER_BYTES = 8 << 20
ROUTES = "/api/v1/routes"
ROUTE = f"{ROUTES}/{{name}}"
NDJSON, OCTETS = ("application/x-ndjson", "application/ndjson"), "application/octet-stream"


class Definition(Struct, forbid_unknown_fields=True):
    name: str
    destination: dict[str, Any]
    source: dict[str, Any] | str | None = None
    batch: dict[str, Any] | None = None
    queue: dict[str, Any] | None = None

    def tree(self) -> dict[str, Any]:
        """As it would stand in the configuration."""
        given = {
            "destination": self.destination,
            "source": self.source,
            "batch": self.batch,
            "queue": self.queue,
        }
        return {word: value for word, value in given.items() if value is not None}


class DeleteQuery(Struct, frozen=True):
    force: bool = False


class LettersQuery(Struct, frozen=True):
    limit: Annotated[int, Meta(ge=0, le=10_000)] = 100
    offset: Annotated[int, Meta(ge=0)] = 0


class WaitingQuery(Struct, frozen=True):
    limit: Annotated[int, Meta(ge=0, le=10_000)] = 100


class Records(Struct):
    records: list[Raw]


class RouteSource(Struct, omit_defaults=True):
    topic: str | None = None
    queue: str | None = None
    group: str | None = None  # of the queue


class Accounting(Struct, rename="camel"):
    """All records ever accepted, by outcome."""

    accepted: int
    delivered: int
    dead_lettered: int
    dropped: dict[str, int]  # by reason
    queued: int


class QueueOfRoute(Struct, rename="camel"):
    """The send queue."""

    accounting: Accounting
    batches: int
    records: int
    leased: int
    bytes: int
    disk_bytes: int
    memory_blocks: int
    oldest_age_seconds: float
    batches_in_per_second: float
    batches_out_per_second: float
    drain_eta_seconds: float
    time_to_full_seconds: float
    storage_failing: str | None


class Breaker(Struct):
    state: str
    failures: int


class Workers(Struct, rename="camel"):
    total: int
    active: int
    target: int
    inflight: int
    latency_seconds: float


class RouteStatus(Struct, rename="camel", kw_only=True):
    """A route. If it could not start, only its name, state and last error are present."""

    name: str
    state: str
    last_error: str | None
    paused: str | UnsetType | None = UNSET  # why; null: it is not
    tries_again_seconds: float | UnsetType | None = UNSET
    source: RouteSource | str | UnsetType = UNSET  # "push": none
    lag: int | UnsetType | None = UNSET
    source_error: str | UnsetType | None = UNSET
    source_damage: str | UnsetType | None = UNSET
    destination: str | UnsetType = UNSET
    queue: QueueOfRoute | UnsetType = UNSET
    breaker: Breaker | UnsetType = UNSET
    backoff_seconds: float | UnsetType = UNSET
    workers: Workers | UnsetType = UNSET
    dead_letters: int | UnsetType = UNSET
    failing_since: float | UnsetType | None = UNSET


class Routes(Struct):
    routes: list[RouteStatus]


class DamagedBytes(Struct):
    at: int
    bytes: int


class Chunk(Struct, omit_defaults=True):
    """A file of the send queue."""

    name: str
    bytes: int
    blocks: int
    waiting: int
    damaged: list[DamagedBytes]
    first: int | UnsetType = UNSET  # sequence numbers; absent: it has no block
    last: int | UnsetType = UNSET


class Inspection(Struct, rename="camel"):
    """The files of a route, read and checked."""

    chunks: list[Chunk]
    waiting_batches: int
    waiting_records: int
    journal_entries: int
    accounting: Accounting
    position: int
    dead_letters: int
    meta: dict[str, Any] | None
    problems: list[str]


class Pushed(Struct):
    accepted: int
    dropped: int


class Count(Struct):
    records: int


class DeadLetter(Struct):
    sequence: int
    index: int
    reason: str
    detail: str
    attempts: int
    enqueued: float
    died: float
    record: str
    encoding: str


class Letters(Struct):
    total: int
    letters: list[DeadLetter]
    next: int | None  # the `offset` of the next page; null: these were the last


class WaitingRecord(Struct):
    sequence: int  # of its batch
    index: int  # in its batch
    record: str
    encoding: str


class Waiting(Struct):
    records: list[WaitingRecord]


_decode_records = Decoder(Records).decode


class ExportApi:
    tag = "export"

    def __init__(self, exports: Exports) -> None:
        self._exports = exports

    @route("GET", ROUTES, answer=Routes, summary="List all routes with their status")
    async def everything(self, _: Request) -> Response:
        await self._exports.refresh()
        return json_response(Routes(convert(self._exports.status(), list[RouteStatus])))

    @route(
        "POST",
        ROUTES,
        body=Definition,
        answer=RouteStatus,
        status=201,
        summary="Create a route",
        role=Role.ADMIN,
        audit=Audited("route.create", body=("name",)),
    )
    async def create(self, request: Request) -> Response:
        definition: Definition = request.data
        made = await self._exports.create(definition.name, definition.tree())
        return _status(made, 201)

    @route("GET", ROUTE, answer=RouteStatus, summary="A route's status")
    async def one(self, request: Request) -> Response:
        named = self._named(request)
        await named.refresh()
        return _status(named)

    @route(
        "DELETE",
        ROUTE,
        query=DeleteQuery,
        status=204,
        summary="Stop and delete a route",
        role=Role.ADMIN,
        audit=Audited("route.delete"),
    )
    async def delete(self, request: Request) -> Response:
        await self._exports.delete(request.params["name"], force=request.args.force)
        return EMPTY

    @route(
        "POST",
        f"{ROUTE}/push",
        media=(OCTETS, *NDJSON),
        answer=Pushed,
        status=201,
        summary="Add records to the route's send queue",
    )
    async def push(self, request: Request) -> Response:
        pushed = await self._named(request).push(_records(request))
        return json_response(Pushed(pushed.accepted, pushed.dropped), 201)

    @route(
        "POST",
        f"{ROUTE}/pause",
        answer=RouteStatus,
        summary="Pause a route: it sends nothing until it is resumed",
        role=Role.ADMIN,
        audit=Audited("route.pause"),
    )
    async def pause(self, request: Request) -> Response:
        named = self._named(request)
        await named.pause()
        return _status(named)

    @route(
        "POST",
        f"{ROUTE}/resume",
        answer=RouteStatus,
        summary="Resume a paused or draining route",
        role=Role.ADMIN,
        audit=Audited("route.resume"),
    )
    async def resume(self, request: Request) -> Response:
        named = self._named(request)
        await named.resume()
        return _status(named)

    @route(
        "POST",
        f"{ROUTE}/drain",
        answer=RouteStatus,
        summary="Drain a route: accept no new records and deliver the queued ones",
        role=Role.ADMIN,
        audit=Audited("route.drain"),
    )
    async def drain(self, request: Request) -> Response:
        named = self._named(request)
        await named.drain()
        return _status(named)

    @route(
        "POST",
        f"{ROUTE}/purge",
        answer=Count,
        summary="Drop all records in the route's send queue",
        role=Role.ADMIN,
        audit=Audited("route.purge", answer=("records",)),
    )
    async def purge(self, request: Request) -> Response:
        return json_response(Count(await self._named(request).purge()))

    @route(
        "POST",
        f"{ROUTE}/replay",
        answer=Count,
        summary="Put the route's dead letters back into its send queue",
        role=Role.ADMIN,
        audit=Audited("route.replay", answer=("records",)),
    )
    async def replay(self, request: Request) -> Response:
        return json_response(Count(await self._named(request).replay()))

    @route(
        "GET",
        f"{ROUTE}/deadletters",
        query=LettersQuery,
        answer=Letters,
        summary="List the route's dead letters",
    )
    async def dead_letters(self, request: Request) -> Response:
        named, args = self._named(request), request.args
        page = await named.letters(args.offset, args.limit)
        sizes = accumulate(len(letter.record) if letter is not None else 0 for letter in page)
        page = page[: max(1, bisect_right(list(sizes), ANSWER_BYTES))]
        following = args.offset + len(page)
        total = named.dead_letters.count
        shown = [DeadLetter(**_letter(letter)) for letter in page if letter is not None]
        return json_response(
            Letters(total, shown, following if following < total and page else None)
        )

    @route(
        "GET",
        f"{ROUTE}/records",
        query=WaitingQuery,
        answer=Waiting,
        summary="List records in the route's send queue",
    )
    async def waiting(self, request: Request) -> Response:
        rows = await self._exports.waiting_records(
            request.params["name"], request.args.limit, ANSWER_BYTES
        )
        return json_response(
            Waiting([WaitingRecord(at, index, **_text(record)) for at, index, record in rows])
        )

    @route(
        "GET",
        f"{ROUTE}/inspect",
        answer=Inspection,
        summary="Read and verify the route's files",
    )
    async def inspect(self, request: Request) -> Response:
        return json_response(
            convert(await self._exports.inspect(request.params["name"]), Inspection)
        )

    def _named(self, request: Request) -> Route:
        return self._exports.get(request.params["name"])


def _status(named: Route, status: int = 200) -> Response:
    return json_response(convert(named.status(), RouteStatus), status)


def _records(request: Request) -> list[bytes]:
    kind = (request.header("content-type") or "application/json").partition(";")[0].strip().lower()
    if kind == OCTETS:
        return [request.body]
    if kind in NDJSON:
        records = [line for line in request.body.split(b"\n") if line.strip()]
    else:
        records = [bytes(record) for record in _decode_records(request.body).records]
    if not records:
        raise InvalidRequest("no records in the request")
    return records


def _letter(letter: Any) -> dict[str, Any]:
    fields = {
        name: getattr(letter, name)
        for name in DeadLetter.__struct_fields__
        if name not in ("record", "encoding")
    }
    return fields | _text(letter.record)


def _text(record: bytes) -> dict[str, str]:
    try:
        return {"record": record.decode(), "encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"record": base64.b64encode(record).decode(), "encoding": "base64"}
