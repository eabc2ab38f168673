"""Stored messages one by one: what an operator looks at and mends."""

from penstock.contract import operations
from penstock.contract.messages import (
    BuryBody,
    MessageBuried,
    MessageDeleted,
    MessageRetried,
    StoredMessages,
    TraceAdded,
    TraceBody,
)
from penstock.contract.queries import GroupQuery, MessagesQuery
from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.names import QUEUE_MODE
from penstock.queues.admin.messages import MessageFilter
from penstock.queues.engine import Queues
from penstock.wire.http.routes import serves
from penstock.wire.queen.aliases import STATES


class StoredApi:
    tag = "messages"

    def __init__(self, queues: Queues) -> None:
        self._messages = queues.messages
        self._traces = queues.traces

    @serves(operations.LIST_MESSAGES)
    async def list_messages(self, args: MessagesQuery) -> StoredMessages:
        status = args.status or None
        which = MessageFilter(
            queue=args.queue or None,
            partition=args.partition or None,
            namespace=args.ns or None,
            task=args.task or None,
            state=status and STATES.get(status, status),
            since=args.since,
            until=args.until,
        )
        return await self._messages.listing(which, args.limit, args.offset, args.cursor)

    @serves(operations.DELETE_MESSAGE)
    async def delete(self, partition: str, transaction: str) -> MessageDeleted:
        if not await self._messages.delete(partition, transaction):
            raise NotFound("Message not found")
        return MessageDeleted(partition, transaction)

    @serves(operations.RETRY_MESSAGE)
    async def retry(self, partition: str, transaction: str, args: GroupQuery) -> MessageRetried:
        groups = await self._messages.retry(partition, transaction, args.consumer_group or None)
        return MessageRetried(partition, transaction, groups)

    @serves(operations.BURY_MESSAGE)
    async def bury(
        self, partition: str, transaction: str, args: GroupQuery, body: BuryBody | None
    ) -> MessageBuried:
        body = body or BuryBody()
        group = args.consumer_group or body.consumer_group or QUEUE_MODE
        moved = await self._messages.move_to_dead_letters(partition, transaction, group, body.error)
        return MessageBuried(partition, transaction, moved)

    @serves(operations.ADD_TRACE)
    async def add_trace(self, body: TraceBody) -> TraceAdded:
        if not body.transaction_id or not body.partition_id:
            raise InvalidRequest("transactionId and partitionId are required")
        if not bytes(body.data):
            raise InvalidRequest("data is required")
        names = [body.trace_names] if isinstance(body.trace_names, str) else body.trace_names
        trace = await self._traces.add(
            body.partition_id,
            body.transaction_id,
            bytes(body.data),
            group=body.consumer_group or QUEUE_MODE,
            event_type=body.event_type or "info",
            names=[name for name in names or [] if name],
        )
        return TraceAdded(trace)
