"""Consumers: what they report about themselves, and looking at it."""

from typing import Annotated

import msgspec

from penstock.queues.consumer_reports import MAX_REPORTS, ConsumerReport
from penstock.queues.presence import Presence
from penstock.wire.http.messages import Request, Response, json_response
from penstock.wire.http.routes import route


class ConsumersQuery(msgspec.Struct, frozen=True):
    queue: str | None = None
    group: str | None = None


class ReportBody(msgspec.Struct):
    consumers: Annotated[list[ConsumerReport], msgspec.Meta(max_length=MAX_REPORTS)]


class Consumers(msgspec.Struct):
    consumers: list[ConsumerReport]


class Reported(msgspec.Struct):
    reported: int


class ConsumersApi:
    """Consumers of queues."""

    tag = "groups"

    def __init__(self, presence: Presence) -> None:
        self._presence = presence

    @route(
        "GET",
        "/api/v1/consumers",
        query=ConsumersQuery,
        answer=Consumers,
        summary="Running consumers, as they report themselves: messages in flight, counts, last "
        "error",
    )
    async def listing(self, request: Request) -> Response:
        args: ConsumersQuery = request.args
        return json_response(
            Consumers(
                [
                    report
                    for report in await self._presence.consumers()
                    if args.queue in (None, "", report.queue)
                    and args.group in (None, "", report.group)
                ]
            )
        )

    @route(
        "POST",
        "/api/v1/consumers",
        body=ReportBody,
        answer=Reported,
        summary="Report the status of consumers; the Python client does so every few seconds",
    )
    async def report(self, request: Request) -> Response:
        body: ReportBody = request.data
        self._presence.reports.add(body.consumers)
        return json_response(Reported(len(body.consumers)))
