"""Consumers: what they report about themselves, and looking at it."""

from typing import Annotated

import msgspec

from penstock.queues.background.consumer_reports import MAX_REPORTS, ConsumerReport
from penstock.queues.background.presence import Presence
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
    tag = "groups"

    def __init__(self, presence: Presence) -> None:
        self._presence = presence

    @route("GET", "/api/v1/consumers")
    async def listing(self, args: ConsumersQuery) -> Consumers:
        """Running consumers, as they report themselves: messages in flight, counts, last error."""
        return Consumers(
            [
                report
                for report in await self._presence.consumers()
                if args.queue in (None, "", report.queue) and args.group in (None, "", report.group)
            ]
        )

    @route("POST", "/api/v1/consumers")
    async def report(self, body: ReportBody) -> Reported:
        """Report the status of consumers; the Python client does so every few seconds."""
        self._presence.reports.add(body.consumers)
        return Reported(len(body.consumers))
