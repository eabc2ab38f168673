"""Export routes over HTTP.

An answer with records ends at ANSWER_BYTES, however many were asked for; `next` is the `offset` of
the following one.
"""

from bisect import bisect_right
from itertools import accumulate
from typing import Any

from msgspec.structs import asdict

from penstock.contract import operations
from penstock.contract.noun import of
from penstock.contract.queries import ForceQuery, LimitQuery, RouteDeadLettersQuery
from penstock.contract.routes import (
    DeadRecordPage,
    RecordCount,
    RouteDeadLetter,
    RouteDefinition,
    RouteInspection,
    RouteList,
    RoutePushed,
    RouteRecords,
    RouteStatus,
    WaitingRecord,
    WaitingRecords,
)
from penstock.errors import InvalidRequest
from penstock.export.deadletters import as_text
from penstock.export.manager import Exports
from penstock.wire.http.decoding import body_decoder
from penstock.wire.http.messages import Request
from penstock.wire.http.routes import serves

ANSWER_BYTES = 8 << 20
NDJSON, OCTETS = ("application/x-ndjson", "application/ndjson"), "application/octet-stream"
read_records = body_decoder(RouteRecords)


class ExportApi:
    tag = "export"

    def __init__(self, exports: Exports) -> None:
        self._exports = exports

    @serves(operations.LIST_ROUTES)
    async def everything(self) -> RouteList:
        await self._exports.refresh()
        return RouteList(self._exports.status())

    @serves(operations.CREATE_ROUTE)
    async def create(self, body: RouteDefinition) -> RouteStatus:
        return (await self._exports.create(body.name, _tree(body))).status()

    @serves(operations.GET_ROUTE)
    async def one(self, name: str) -> RouteStatus:
        named = self._exports.get(name)
        await named.refresh()
        return named.status()

    @serves(operations.DELETE_ROUTE)
    async def delete(self, name: str, args: ForceQuery) -> None:
        await self._exports.delete(name, force=args.force)

    @serves(operations.PUSH_TO_ROUTE, media=(OCTETS, *NDJSON))
    async def push(self, request: Request, name: str) -> RoutePushed:
        named = self._exports.get(name)
        if takes := named.spec.target.takes:
            below = "v1/{signal}" if takes == "otlp" else "write"
            raise InvalidRequest(f"route {name} takes {takes}, at /api/v1/routes/{name}/{below}")
        pushed = await named.push(_records(request))
        return RoutePushed(pushed.accepted, pushed.dropped)

    @serves(operations.CONTROL_ROUTE)
    async def control(self, name: str, action: str) -> RouteStatus:
        named = self._exports.get(name)
        act = {"pause": named.pause, "resume": named.resume, "drain": named.drain}[action]
        await act()
        return named.status()

    @serves(operations.PURGE_ROUTE)
    async def purge(self, name: str) -> RecordCount:
        return RecordCount(await self._exports.get(name).purge())

    @serves(operations.REPLAY_ROUTE)
    async def replay(self, name: str) -> RecordCount:
        return RecordCount(await self._exports.get(name).replay())

    @serves(operations.LIST_ROUTE_DEAD_LETTERS)
    async def dead_letters(self, name: str, args: RouteDeadLettersQuery) -> DeadRecordPage:
        named = self._exports.get(name)
        page = await named.letters(args.offset, args.limit)
        sizes = accumulate(len(letter.record) if letter is not None else 0 for letter in page)
        page = page[: max(1, bisect_right(list(sizes), ANSWER_BYTES))]
        following = args.offset + len(page)
        total = named.dead_letters.count
        shown = [
            of(RouteDeadLetter, letter, **as_text(letter.record))
            for letter in page
            if letter is not None
        ]
        return DeadRecordPage(total, shown, following if following < total and page else None)

    @serves(operations.LIST_ROUTE_RECORDS)
    async def waiting(self, name: str, args: LimitQuery) -> WaitingRecords:
        rows = await self._exports.waiting_records(name, args.limit, ANSWER_BYTES)
        records = [WaitingRecord(at, index, **as_text(record)) for at, index, record in rows]
        return WaitingRecords(records)

    @serves(operations.INSPECT_ROUTE)
    async def inspect(self, name: str) -> RouteInspection:
        return await self._exports.inspect(name)


def _tree(definition: RouteDefinition) -> dict[str, Any]:
    """Return the route as it would be in the configuration."""
    parts = asdict(definition)
    return {word: parts[word] for word in parts if word != "name" and parts[word] is not None}


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
