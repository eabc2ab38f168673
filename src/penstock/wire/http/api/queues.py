"""Collect the routes of the queue API. Every process serves them itself.

`penstock.wire.queen` adds what only clients of Queen MQ use.
"""

from penstock.broker import Broker
from penstock.contract import operations
from penstock.contract.consumers import Consumers, ConsumersReport, Reported
from penstock.contract.messages import ScheduledMessages
from penstock.contract.queries import ConsumersQuery, ScheduledQuery
from penstock.contract.schedules import Schedule, ScheduleList
from penstock.monitor.inspection import Inspection
from penstock.queues.background.presence import Presence
from penstock.queues.engine import Queues
from penstock.wire.http.api.analytics import AnalyticsApi
from penstock.wire.http.api.configure import ConfigureApi
from penstock.wire.http.api.dead_letters import DeadLettersApi
from penstock.wire.http.api.deliveries import DeliveriesApi
from penstock.wire.http.api.groups import GroupsApi
from penstock.wire.http.api.messages import MessagesApi
from penstock.wire.http.api.pushes import PushesApi
from penstock.wire.http.api.sinks import SinksApi
from penstock.wire.http.api.transactions import TransactionsApi
from penstock.wire.http.routes import Api, HttpRoute, calling, routes_of
from penstock.wire.queen.cluster import ClusterApi
from penstock.wire.queen.groups import QueenGroupsApi
from penstock.wire.queen.messages import QueenMessagesApi
from penstock.wire.queen.queues import QueenQueuesApi
from penstock.wire.queen.streams import StreamsApi


def queue_routes(broker: Broker) -> list[HttpRoute]:
    queues, buffer, presence = broker.queues, broker.buffer, broker.presence
    apis: list[Api] = [
        PushesApi(buffer, queues.settings.max_items),
        DeliveriesApi(queues),
        TransactionsApi(queues, buffer),
        StreamsApi(queues, buffer),
        ConfigureApi(queues),
        QueenQueuesApi(queues, presence),
        GroupsApi(queues),
        QueenGroupsApi(queues),
        DeadLettersApi(queues),
        MessagesApi(queues),
        QueenMessagesApi(queues),
        AnalyticsApi(queues),
        ClusterApi(queues, presence),
        SinksApi(queues.sinks, buffer, queues.settings.max_items),
    ]
    return [*routes_of(*apis), *_direct_routes(queues, presence)]


def _direct_routes(queues: Queues, presence: Presence) -> list[HttpRoute]:
    """Return the routes of operations that one call of the engine answers."""
    scheduled, schedules, messages = queues.scheduled, queues.schedules, queues.messages
    inspection = Inspection(queues)

    async def list_scheduled(args: ScheduledQuery) -> ScheduledMessages:
        queue, partition = args.queue or None, args.partition or None
        return await scheduled.listing(queue, partition, args.limit, args.cursor)

    async def list_schedules() -> ScheduleList:
        return ScheduleList(await schedules.listing())

    async def list_consumers(args: ConsumersQuery) -> Consumers:
        reports = await presence.consumers()
        if args.queue:
            reports = [one for one in reports if one.queue == args.queue]
        if args.group:
            reports = [one for one in reports if one.group == args.group]
        return Consumers(reports)

    def report_consumers(body: ConsumersReport) -> Reported:
        presence.reports.add(body.consumers)
        return Reported(len(body.consumers))

    async def control_schedule(name: str, action: str) -> Schedule:
        return await schedules.pause(name, paused=action == "pause")

    return [
        calling(operations.LIST_CONSUMERS, list_consumers),
        calling(operations.REPORT_CONSUMERS, report_consumers),
        calling(operations.GET_MESSAGE, messages.detail),
        calling(operations.GET_LIFELINE, inspection.lifeline),
        calling(operations.SEARCH_MESSAGES, inspection.search),
        calling(operations.LIST_ERRORS, inspection.errors),
        calling(operations.GET_HISTORY, inspection.history),
        calling(operations.LIST_QUEUE_PARTITIONS, inspection.partitions),
        calling(operations.LIST_SCHEDULED, list_scheduled),
        calling(operations.GET_SCHEDULED, scheduled.detail),
        calling(operations.CANCEL_SCHEDULED, scheduled.cancel),
        calling(operations.LIST_SCHEDULES, list_schedules),
        calling(operations.GET_SCHEDULE, schedules.get),
        calling(operations.PUT_SCHEDULE, schedules.put),
        calling(operations.DELETE_SCHEDULE, schedules.delete),
        calling(operations.CONTROL_SCHEDULE, control_schedule),
        calling(operations.RUN_SCHEDULE, schedules.run),
    ]
