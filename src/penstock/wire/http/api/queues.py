"""Configure, clear and delete queues over HTTP, and collect the routes that every process serves
itself. `penstock.wire.queen` adds what only clients of Queen MQ use.
"""

from typing import Any

import msgspec

from penstock.broker import Broker
from penstock.contract import operations
from penstock.contract.consumers import Consumers, ConsumersReport, Reported
from penstock.contract.messages import ScheduledMessages
from penstock.contract.queries import ClearQuery, ConsumersQuery, ScheduledQuery
from penstock.contract.queues import (
    ConfigureBody,
    Configured,
    OptionMeaning,
    OptionsOfQueue,
    QueueCleared,
    QueueDeleted,
)
from penstock.contract.schedules import Schedule, ScheduleList
from penstock.errors import InvalidRequest, NotFound
from penstock.monitor.inspection import Inspection
from penstock.protocol.status import NOT_JSON
from penstock.queues.background.presence import Presence
from penstock.queues.engine import Queues
from penstock.queues.options import BY_NAME, OPTIONS, parse
from penstock.wire.http.api.analytics import AnalyticsApi
from penstock.wire.http.api.dead_letters import DeadLettersApi
from penstock.wire.http.api.deliveries import DeliveriesApi
from penstock.wire.http.api.groups import GroupsApi
from penstock.wire.http.api.messages import MessagesApi
from penstock.wire.http.api.pushes import PushesApi
from penstock.wire.http.api.sinks import SinksApi
from penstock.wire.http.api.transactions import TransactionsApi
from penstock.wire.http.decoding import body_decoder
from penstock.wire.http.messages import Request
from penstock.wire.http.routes import Api, HttpRoute, calling, routes_of, serves
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


ABOUT = [OptionMeaning(option.name, option.default, option.meaning) for option in OPTIONS]
read_options = body_decoder(dict[str, msgspec.Raw])
read_configure = body_decoder(ConfigureBody)


class ConfigureApi:
    tag = "queues"

    def __init__(self, queues: Queues) -> None:
        self._admin = queues.admin
        self._catalog = queues.catalog

    @serves(operations.CONFIGURE_QUEUE)
    async def configure(self, request: Request) -> Configured:
        body = read_configure(request.body)
        if not body.queue:
            raise InvalidRequest("queue is required")
        misplaced = [name for name in read_options(request.body) if name in BY_NAME]
        if misplaced:  # it would silently not be in force
            raise InvalidRequest(f"{', '.join(misplaced)} must be in options")
        options = parse({name: _option(name, raw) for name, raw in (body.options or {}).items()})
        return await self._admin.configure(body.queue, options, body.namespace, body.task)

    @serves(operations.GET_QUEUE_OPTIONS)
    async def options(self, queue: str) -> OptionsOfQueue:
        info = await self._catalog.queue(queue)
        if info is None:
            raise NotFound(f"queue '{queue}' does not exist")
        return OptionsOfQueue(info.name, info.options, ABOUT)

    @serves(operations.CHANGE_QUEUE_OPTIONS)
    async def change(self, request: Request, queue: str) -> OptionsOfQueue:
        values = {name: _option(name, raw) for name, raw in read_options(request.body).items()}
        options = parse(values)
        only = {BY_NAME[name].field for name, value in values.items() if value is not None}
        return OptionsOfQueue(queue, await self._admin.change(queue, options, only), ABOUT)

    @serves(operations.DELETE_QUEUE)
    async def delete(self, queue: str) -> QueueDeleted:
        return QueueDeleted(True, queue, await self._admin.delete(queue))

    @serves(operations.CLEAR_QUEUE)
    async def clear(self, queue: str, args: ClearQuery) -> QueueCleared:
        partition = args.partition or None
        return QueueCleared(queue, partition, await self._admin.clear(queue, partition))


def _option(name: str, raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except NOT_JSON as error:
        raise InvalidRequest(f"option {name[:60]} is not understood: {error}") from None
