"""Export routes over HTTP.

An answer with records ends at ANSWER_BYTES, however many were asked for; `next` is the `offset` of
the following one.
"""

from bisect import bisect_right
from itertools import accumulate
from typing import Annotated, Any

from msgspec import Meta, Raw, Struct
from msgspec.structs import asdict

from penstock.contract.operation import Audited
from penstock.contract.queries import Limit
from penstock.contract.routes import RoutePushed
from penstock.errors import InvalidRequest
from penstock.export.deadletters import as_text
from penstock.export.manager import Exports
from penstock.export.status import Inspection, RouteStatus
from penstock.wire.auth import Role
from penstock.wire.http.answers import of
from penstock.wire.http.decoding import body_decoder
from penstock.wire.http.messages import Request
from penstock.wire.http.routes import route

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
        return {
            word: value
            for word, value in asdict(self).items()
            if word != "name" and value is not None
        }


class DeleteQuery(Struct, frozen=True):
    force: bool = False


class WaitingQuery(Struct, frozen=True):
    limit: Limit = 100


class LettersQuery(WaitingQuery, frozen=True):
    offset: Annotated[int, Meta(ge=0)] = 0


class Records(Struct):
    records: list[Raw]


class Routes(Struct):
    routes: list[RouteStatus]


class Count(Struct):
    records: int


class WaitingRecord(Struct):
    sequence: int  # of its batch
    index: int  # in its batch
    record: str
    encoding: str


class Waiting(Struct):
    records: list[WaitingRecord]


class DeadLetter(WaitingRecord):
    reason: str
    detail: str
    attempts: int
    enqueued: float
    died: float


class Letters(Struct):
    total: int
    letters: list[DeadLetter]
    next: int | None  # the `offset` of the next page; null: these were the last


read_records = body_decoder(Records)


class ExportApi:
    tag = "export"

    def __init__(self, exports: Exports) -> None:
        self._exports = exports

    @route("GET", ROUTES)
    async def everything(self) -> Routes:
        """List all routes with their status."""
        await self._exports.refresh()
        return Routes(self._exports.status())

    @route(
        "POST", ROUTES, status=201, role=Role.ADMIN, audit=Audited("route.create", body=("name",))
    )
    async def create(self, body: Definition) -> RouteStatus:
        """Create a route."""
        return (await self._exports.create(body.name, body.tree())).status()

    @route("GET", ROUTE)
    async def one(self, name: str) -> RouteStatus:
        """A route's status."""
        named = self._exports.get(name)
        await named.refresh()
        return named.status()

    @route("DELETE", ROUTE, role=Role.ADMIN, audit=Audited("route.delete"))
    async def delete(self, name: str, args: DeleteQuery) -> None:
        """Stop and delete a route."""
        await self._exports.delete(name, force=args.force)

    @route("POST", f"{ROUTE}/push", media=(OCTETS, *NDJSON), status=201)
    async def push(self, request: Request, name: str) -> RoutePushed:
        """Add records to the route's send queue."""
        named = self._exports.get(name)
        if takes := named.spec.target.takes:
            below = "v1/{signal}" if takes == "otlp" else "write"
            raise InvalidRequest(f"route {name} takes {takes}, at {ROUTES}/{name}/{below}")
        pushed = await named.push(_records(request))
        return RoutePushed(pushed.accepted, pushed.dropped)

    @route("POST", f"{ROUTE}/pause", role=Role.ADMIN, audit=Audited("route.pause"))
    async def pause(self, name: str) -> RouteStatus:
        """Pause a route: it sends nothing until it is resumed."""
        named = self._exports.get(name)
        await named.pause()
        return named.status()

    @route("POST", f"{ROUTE}/resume", role=Role.ADMIN, audit=Audited("route.resume"))
    async def resume(self, name: str) -> RouteStatus:
        """Resume a paused or draining route."""
        named = self._exports.get(name)
        await named.resume()
        return named.status()

    @route("POST", f"{ROUTE}/drain", role=Role.ADMIN, audit=Audited("route.drain"))
    async def drain(self, name: str) -> RouteStatus:
        """Drain a route: accept no new records and deliver the queued ones."""
        named = self._exports.get(name)
        await named.drain()
        return named.status()

    @route(
        "POST", f"{ROUTE}/purge", role=Role.ADMIN, audit=Audited("route.purge", answer=("records",))
    )
    async def purge(self, name: str) -> Count:
        """Drop all records in the route's send queue."""
        return Count(await self._exports.get(name).purge())

    @route(
        "POST",
        f"{ROUTE}/replay",
        role=Role.ADMIN,
        audit=Audited("route.replay", answer=("records",)),
    )
    async def replay(self, name: str) -> Count:
        """Put the route's dead letters back into its send queue."""
        return Count(await self._exports.get(name).replay())

    @route("GET", f"{ROUTE}/deadletters")
    async def dead_letters(self, name: str, args: LettersQuery) -> Letters:
        """List the route's dead letters."""
        named = self._exports.get(name)
        page = await named.letters(args.offset, args.limit)
        sizes = accumulate(len(letter.record) if letter is not None else 0 for letter in page)
        page = page[: max(1, bisect_right(list(sizes), ANSWER_BYTES))]
        following = args.offset + len(page)
        total = named.dead_letters.count
        shown = [
            of(DeadLetter, letter, **as_text(letter.record))
            for letter in page
            if letter is not None
        ]
        return Letters(total, shown, following if following < total and page else None)

    @route("GET", f"{ROUTE}/records")
    async def waiting(self, name: str, args: WaitingQuery) -> Waiting:
        """List records in the route's send queue."""
        rows = await self._exports.waiting_records(name, args.limit, ANSWER_BYTES)
        return Waiting([WaitingRecord(at, index, **as_text(record)) for at, index, record in rows])

    @route("GET", f"{ROUTE}/inspect")
    async def inspect(self, name: str) -> Inspection:
        """Read and verify the route's files."""
        return await self._exports.inspect(name)


def _records(request: Request) -> list[bytes]:
    kind = (request.header("content-type") or "application/json").partition(";")[0].strip().lower()
    if kind == OCTETS:
        return [request.body]
    if kind in NDJSON:
        records = [line for line in request.body.split(b"\n") if line.strip()]
    else:
        records = [bytes(record) for record in read_records(request.body).records]
    if not records:
        raise InvalidRequest("no records in the request")
    return records
