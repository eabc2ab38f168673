"""Read, copy and edit single messages over HTTP, and requeue or delete chosen dead letters."""

from typing import Annotated

import msgspec

from penstock.contract.dead_letters import DeadLetterMessage, Purged, Requeued
from penstock.contract.noun import of
from penstock.contract.operation import Audited
from penstock.contract.queries import DeadLetterPageQuery
from penstock.errors import InvalidRequest
from penstock.monitor.inspection import ListedLetter, preview_of
from penstock.monitor.mending import Mending
from penstock.protocol.times import epoch_millis
from penstock.queues.engine import Queues
from penstock.queues.types import ItemOutcome
from penstock.wire.auth import Role
from penstock.wire.http.api.deadletters import which
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import route

MAX_CHOSEN = 1000
BYTES = "application/octet-stream"
LETTER = "/api/v1/dlq/{id}"
MESSAGE = "/api/v1/messages/{partition}/{transaction}"
DELAYED = "/api/v1/scheduled/{queue}/{partition}/{transaction}"

LetterId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class ChosenLetters(msgspec.Struct):
    ids: Annotated[list[LetterId], msgspec.Meta(min_length=1, max_length=MAX_CHOSEN)]


class EditedPayload(msgspec.Struct):
    payload: msgspec.Raw


class StoredCopy(msgspec.Struct, rename="camel"):
    """Where the new message is."""

    status: str
    partition_id: str
    transaction_id: str


class ListedLetters(msgspec.Struct):
    letters: list[ListedLetter]
    total: int  # that match


class MendingApi:
    tag = "internal"

    def __init__(self, queues: Queues) -> None:
        self._mending = Mending(queues)
        self._messages = queues.messages
        self._scheduled = queues.scheduled
        self._dead = queues.dead

    @route("GET", f"{MESSAGE}/payload", answer_type=BYTES)
    async def payload(self, request: Request) -> Response:
        """The payload of a message, byte by byte as it was pushed."""
        names = (request.params[name] for name in ("partition", "transaction"))
        return _bytes(bytes((await self._messages.detail(*names)).payload))

    @route("POST", f"{MESSAGE}/copy", status=201, audit=Audited("message.copy"))
    async def copy(self, request: Request, partition: str, transaction: str) -> StoredCopy:
        """Push a copy of a message to the end of its partition, under a new transaction id."""
        return _stored(await self._mending.copy(partition, transaction, request.subject))

    @route("GET", f"{DELAYED}/payload", answer_type=BYTES)
    async def delayed_payload(self, request: Request) -> Response:
        """The payload of a delayed message, byte by byte as it was pushed."""
        names = (request.params[name] for name in ("queue", "partition", "transaction"))
        return _bytes((await self._scheduled.detail(*names)).payload)

    @route("GET", "/api/v1/dlq/previews")
    async def previews(self, args: DeadLetterPageQuery) -> ListedLetters:
        """List dead letters, newest first, with the beginning of each payload."""
        page = await self._dead.listing(which(args), args.limit, args.offset, args.before)
        return ListedLetters([_listed(letter) for letter in page.messages], page.total)

    @route("GET", f"{LETTER}/payload", answer_type=BYTES)
    async def letter_payload(self, request: Request) -> Response:
        """The payload of a dead letter, byte by byte as it was pushed."""
        return _bytes((await self._mending.letter(_number(request.params["id"]))).data)

    @route(
        "POST",
        f"{LETTER}/edit",
        status=201,
        audit=Audited("deadletters.edit", answer=("partitionId", "transactionId")),
    )
    async def edit(self, request: Request, id: str, body: EditedPayload) -> StoredCopy:
        """Push a dead letter with another payload and delete the dead letter. A trace of the new
        message keeps the old payload.
        """
        payload = bytes(body.payload)
        return _stored(await self._mending.edit(_number(id), payload, request.subject))

    @route(
        "POST",
        "/api/v1/dlq/chosen/requeue",
        audit=Audited("deadletters.requeue", body=("ids",), answer=("requeued",)),
    )
    async def requeue(self, body: ChosenLetters) -> Requeued:
        """Requeue the dead letters with these ids."""
        return Requeued(await self._mending.requeue(body.ids))

    @route(
        "POST",
        "/api/v1/dlq/chosen/delete",
        role=Role.ADMIN,
        audit=Audited("deadletters.purge", body=("ids",), answer=("deleted",)),
    )
    async def purge(self, body: ChosenLetters) -> Purged:
        """Delete the dead letters with these ids."""
        return Purged(await self._mending.purge(body.ids))


def _listed(letter: DeadLetterMessage) -> ListedLetter:
    return of(
        ListedLetter,
        letter,
        failed_at=epoch_millis(letter.failed_at),
        preview=preview_of(bytes(letter.data or b"")),
    )


def _bytes(payload: bytes | None) -> Response:
    return Response(200, payload or b"", content_type=BYTES)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 62:
        raise InvalidRequest("the id of a dead letter is a number")
    return int(text)


def _stored(pushed: ItemOutcome) -> StoredCopy:
    return StoredCopy(pushed.status, str(pushed.partition_id), pushed.transaction_id)
