"""Consumers: what they report about themselves, and looking at it."""

from penstock.contract import operations
from penstock.contract.consumers import Consumers, ConsumersReport, Reported
from penstock.contract.queries import ConsumersQuery
from penstock.queues.background.presence import Presence
from penstock.wire.http.routes import serves


class ConsumersApi:
    tag = "groups"

    def __init__(self, presence: Presence) -> None:
        self._presence = presence

    @serves(operations.LIST_CONSUMERS)
    async def listing(self, args: ConsumersQuery) -> Consumers:
        return Consumers(
            [
                report
                for report in await self._presence.consumers()
                if args.queue in (None, "", report.queue) and args.group in (None, "", report.group)
            ]
        )

    @serves(operations.REPORT_CONSUMERS)
    async def report(self, body: ConsumersReport) -> Reported:
        self._presence.reports.add(body.consumers)
        return Reported(len(body.consumers))
