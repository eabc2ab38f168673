"""Stored messages over HTTP: list them, and read, copy, retry and delete one."""

from penstock.contract import operations
from penstock.contract.messages import MessageDeleted, MessageRetried, StoredMessages
from penstock.contract.operation import Audited
from penstock.contract.queries import GroupQuery, MessagesQuery
from penstock.errors import NotFound
from penstock.monitor.mending import Mending
from penstock.queues.admin.messages import MessageFilter
from penstock.queues.engine import Queues
from penstock.wire.http.api.dead_letters import BYTES, StoredCopy, stored_copy
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import route, serves
from penstock.wire.queen.aliases import STATES

MESSAGE = "/api/v1/messages/{partition}/{transaction}"


class MessagesApi:
    tag = "messages"

    def __init__(self, queues: Queues) -> None:
        self._mending = Mending(queues)
        self._messages = queues.messages
        self._scheduled = queues.scheduled

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

    @route("GET", f"{MESSAGE}/payload", tag="internal", answer_type=BYTES)
    async def payload(self, partition: str, transaction: str) -> Response:
        """Get the payload of a message, byte by byte as it was pushed."""
        message = await self._messages.detail(partition, transaction)
        return Response(200, bytes(message.payload), BYTES)

    @route("POST", f"{MESSAGE}/copy", tag="internal", status=201, audit=Audited("message.copy"))
    async def copy(self, request: Request, partition: str, transaction: str) -> StoredCopy:
        """Push a copy of a message to the end of its partition, under a new transaction id."""
        return stored_copy(await self._mending.copy(partition, transaction, request.subject))

    @route(
        "GET",
        "/api/v1/scheduled/{queue}/{partition}/{transaction}/payload",
        tag="internal",
        answer_type=BYTES,
    )
    async def delayed_payload(self, queue: str, partition: str, transaction: str) -> Response:
        """Get the payload of a delayed message, byte by byte as it was pushed."""
        message = await self._scheduled.detail(queue, partition, transaction)
        return Response(200, message.payload or b"", BYTES)
