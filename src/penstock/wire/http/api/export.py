"""Export routes over HTTP.

GET    /api/v1/routes                       all routes with their status
POST   /api/v1/routes                       make one: {"name", "destination", "source"?, "batch"?, "queue"?}; 201
GET    /api/v1/routes/{name}                depth, bytes, oldest age, breaker, workers, rates, ETA, accounting
DELETE /api/v1/routes/{name}                ?force=true throws away what is queued
POST   /api/v1/routes/{name}/push           {"records": [...]}, application/x-ndjson, or application/octet-stream; 201
POST   /api/v1/routes/{name}/pause          stop sending, go on queueing
POST   /api/v1/routes/{name}/resume
POST   /api/v1/routes/{name}/drain          take nothing new, deliver what there is
POST   /api/v1/routes/{name}/purge          drop what is queued
POST   /api/v1/routes/{name}/replay         queue the dead letters again
GET    /api/v1/routes/{name}/deadletters    ?limit=&offset=
GET    /api/v1/routes/{name}/records        ?limit= what waits to be delivered, oldest first
GET    /api/v1/routes/{name}/inspect        every block of its files is read and checked: that takes its time

An answer with records ends at ANSWER_BYTES, however many were asked for; `next` is the `offset` of
the following one.
"""

import base64
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from itertools import accumulate
from typing import Annotated, Any

from msgspec import Meta, Raw, Struct
from msgspec.json import Decoder

from penstock.errors import InvalidRequest
from penstock.export.manager import Exports
from penstock.export.routes import Route as ExportRoute
from penstock.wire.auth import Role
from penstock.wire.http.messages import EMPTY, Request, Response, json_response
from penstock.wire.http.routes import Route

ANSWER_BYTES = 8 << 20
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


class Routes(Struct):
    routes: list[dict[str, Any]]


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
    next: int | None  # where to go on; null: these were the last


class WaitingRecord(Struct):
    sequence: int  # of its batch
    index: int  # in its batch
    record: str
    encoding: str


class Waiting(Struct):
    records: list[WaitingRecord]


_decode_records = Decoder(Records).decode


def routes(exports: Exports) -> list[Route]:
    def of(request: Request) -> ExportRoute:
        return exports.get(request.params["name"])

    async def everything(_: Request) -> Response:
        await exports.refresh()
        return json_response(Routes(exports.status()))

    async def create(request: Request) -> Response:
        definition: Definition = request.data
        route = await exports.create(definition.name, definition.tree())
        return json_response(route.status(), 201)

    async def one(request: Request) -> Response:
        route = of(request)
        await route.refresh()
        return json_response(route.status())

    async def delete(request: Request) -> Response:
        await exports.delete(request.params["name"], force=request.args.force)
        return EMPTY

    async def push(request: Request) -> Response:
        pushed = await of(request).push(_records(request))
        return json_response(Pushed(pushed.accepted, pushed.dropped), 201)

    def action(
        act: Callable[[ExportRoute], Awaitable[object]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            route = of(request)
            await act(route)
            return json_response(route.status())

        return handler

    async def purge(request: Request) -> Response:
        return json_response(Count(await of(request).purge()))

    async def replay(request: Request) -> Response:
        return json_response(Count(await of(request).replay()))

    async def letters(request: Request) -> Response:
        route, args = of(request), request.args
        page = await route.letters_page(args.offset, args.limit)
        sizes = accumulate(len(letter.record) if letter is not None else 0 for letter in page)
        page = page[: max(1, bisect_right(list(sizes), ANSWER_BYTES))]
        following = args.offset + len(page)
        total = route.dead_letters.count
        shown = [DeadLetter(**_letter(letter)) for letter in page if letter is not None]
        return json_response(
            Letters(total, shown, following if following < total and page else None)
        )

    async def waiting(request: Request) -> Response:
        found = await exports.waiting_records(
            request.params["name"], request.args.limit, ANSWER_BYTES
        )
        return json_response(
            Waiting([WaitingRecord(at, index, **_text(record)) for at, index, record in found])
        )

    async def inspect(request: Request) -> Response:
        return json_response(await exports.inspect(request.params["name"]))

    status, path, tag = dict[str, Any], "/api/v1/routes/{name}", "export"
    admin: dict[str, Any] = {"tag": tag, "role": Role.ADMIN}
    return [
        Route(
            "GET",
            "/api/v1/routes",
            everything,
            answer=Routes,
            summary="All routes with their status",
            tag=tag,
        ),
        Route(
            "POST",
            "/api/v1/routes",
            create,
            body=Definition,
            answer=status,
            status=201,
            summary="Make a route",
            **admin,
        ),
        Route("GET", path, one, answer=status, summary="A route's status", tag=tag),
        Route(
            "DELETE",
            path,
            delete,
            query=DeleteQuery,
            status=204,
            summary="Stop and remove a route",
            **admin,
        ),
        Route(
            "POST",
            f"{path}/push",
            push,
            media=(OCTETS, *NDJSON),
            answer=Pushed,
            status=201,
            summary="Queue records for the destination",
            tag=tag,
        ),
        Route(
            "POST",
            f"{path}/pause",
            action(lambda route: route.pause()),
            answer=status,
            summary="Stop sending",
            **admin,
        ),
        Route(
            "POST",
            f"{path}/resume",
            action(lambda route: route.resume()),
            answer=status,
            summary="Go on",
            **admin,
        ),
        Route(
            "POST",
            f"{path}/drain",
            action(lambda route: route.drain()),
            answer=status,
            summary="Take nothing new, deliver what there is",
            **admin,
        ),
        Route("POST", f"{path}/purge", purge, answer=Count, summary="Drop what is queued", **admin),
        Route(
            "POST",
            f"{path}/replay",
            replay,
            answer=Count,
            summary="Queue the dead letters again",
            **admin,
        ),
        Route(
            "GET",
            f"{path}/deadletters",
            letters,
            query=LettersQuery,
            answer=Letters,
            summary="Dead letters",
            tag=tag,
        ),
        Route(
            "GET",
            f"{path}/records",
            waiting,
            query=WaitingQuery,
            answer=Waiting,
            summary="Waiting records",
            tag=tag,
        ),
        Route(
            "GET",
            f"{path}/inspect",
            inspect,
            answer=status,
            summary="Check a route's files",
            tag=tag,
        ),
    ]


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
