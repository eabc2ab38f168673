"""List, requeue, delete and edit dead letters over HTTP, at once or in background tasks."""

from typing import Annotated, Any

import msgspec

from penstock.contract import operations
from penstock.contract.dead_letters import (
    BackgroundTask,
    DeadLetterMessage,
    DeadLetters,
    Purged,
    Requeued,
    TaskKind,
)
from penstock.contract.inspection import ListedLetter
from penstock.contract.noun import Pagination, of
from penstock.contract.operation import Audited
from penstock.contract.queries import DeadLetterPageQuery, DeadLetterQuery
from penstock.errors import InvalidRequest, NotFound
from penstock.monitor.audit import Audit
from penstock.monitor.inspection import preview_of
from penstock.monitor.mending import Mending
from penstock.monitor.tasks import Tasks
from penstock.protocol.times import epoch_millis
from penstock.queues.admin.dead_letters import Which
from penstock.queues.engine import Queues
from penstock.queues.types import ItemOutcome
from penstock.wire.auth import Role
from penstock.wire.http.audit import object_of
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import route, serves

MAX_CHOSEN = 1000
BYTES = "application/octet-stream"
LETTER = "/api/v1/dlq/{id}"

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


class DeadLettersApi:
    tag = "dead letters"

    def __init__(self, queues: Queues) -> None:
        self._mending = Mending(queues)
        self._dead = queues.dead

    @serves(operations.LIST_DEAD_LETTERS)
    async def page(self, args: DeadLetterPageQuery) -> DeadLetters:
        page = await self._dead.listing(which(args), args.limit, args.offset, args.before)
        page.pagination = Pagination(args.limit, args.offset, page.total)
        return page

    @serves(operations.REQUEUE_DEAD_LETTERS)
    async def requeue(self, args: DeadLetterQuery) -> Requeued:
        return Requeued(_matched(args, await self._dead.requeue(which(args))))

    @serves(operations.PURGE_DEAD_LETTERS)
    async def purge(self, args: DeadLetterQuery) -> Purged:
        return Purged(_matched(args, await self._dead.purge(which(args))))

    @route("GET", "/api/v1/dlq/previews", tag="internal")
    async def previews(self, args: DeadLetterPageQuery) -> ListedLetters:
        """List dead letters, newest first, with the beginning of each payload."""
        page = await self._dead.listing(which(args), args.limit, args.offset, args.before)
        return ListedLetters([_listed(letter) for letter in page.messages], page.total)

    @route("GET", f"{LETTER}/payload", tag="internal", answer_type=BYTES)
    async def payload(self, id: str) -> Response:
        """Get the payload of a dead letter, byte by byte as it was pushed."""
        letter = await self._mending.letter(_number(id))
        return Response(200, letter.data or b"", BYTES)

    @route(
        "POST",
        f"{LETTER}/edit",
        tag="internal",
        status=201,
        audit=Audited("deadletters.edit", answer=("partitionId", "transactionId")),
    )
    async def edit(self, request: Request, id: str, body: EditedPayload) -> StoredCopy:
        """Push a dead letter with another payload and delete the dead letter. A trace of the new
        message keeps the old payload.
        """
        payload = bytes(body.payload)
        return stored_copy(await self._mending.edit(_number(id), payload, request.subject))

    @route(
        "POST",
        "/api/v1/dlq/chosen/requeue",
        tag="internal",
        audit=Audited("deadletters.requeue", body=("ids",), answer=("requeued",)),
    )
    async def requeue_chosen(self, body: ChosenLetters) -> Requeued:
        """Requeue the dead letters with these ids."""
        return Requeued(await self._mending.requeue(body.ids))

    @route(
        "POST",
        "/api/v1/dlq/chosen/delete",
        tag="internal",
        role=Role.ADMIN,
        audit=Audited("deadletters.purge", body=("ids",), answer=("deleted",)),
    )
    async def purge_chosen(self, body: ChosenLetters) -> Purged:
        """Delete the dead letters with these ids."""
        return Purged(await self._mending.purge(body.ids))


class TasksApi:
    tag = "dead letters"

    def __init__(self, queues: Queues, broker: str, audit: Audit) -> None:
        self._audit = audit
        self.tasks = Tasks(queues, broker, self._ended)

    @serves(operations.START_REQUEUE)
    async def requeue(self, request: Request, args: DeadLetterQuery) -> BackgroundTask:
        return await self._begin("requeue", args, request.who)

    @serves(operations.START_PURGE)
    async def purge(self, request: Request, args: DeadLetterQuery) -> BackgroundTask:
        return await self._begin("purge", args, request.who)

    async def _begin(self, kind: TaskKind, args: DeadLetterQuery, by: str) -> BackgroundTask:
        named = {
            "queue": args.queue,
            "partition": args.partition,
            "consumerGroup": args.consumer_group,
        }
        what = object_of(named) or "all queues"
        if args.error:
            what = f"{what}, error contains {args.error[:100]!r}"
        return await self.tasks.start(kind, which(args), what, by)

    async def _ended(self, task: BackgroundTask) -> None:
        detail: dict[str, Any] = {"done": task.done, "state": task.state}
        if task.error:
            detail["error"] = task.error
        await self._audit.record(task.who, f"deadletters.{task.kind}.ended", task.what, detail)


def which(args: DeadLetterQuery) -> Which:
    """Return the dead letters that a query means."""
    return Which(
        queue=args.queue or None,
        group=args.consumer_group or None,
        partition=args.partition or None,
        since=args.since,
        until=args.until,
        id=args.id,
        error=args.error or None,
    )


def _matched(wanted: DeadLetterQuery, count: int) -> int:
    if wanted.id is not None and not count:
        raise NotFound("Dead letter not found")
    return count


def _listed(letter: DeadLetterMessage) -> ListedLetter:
    return of(
        ListedLetter,
        letter,
        failed_at=epoch_millis(letter.failed_at),
        preview=preview_of(bytes(letter.data or b"")),
    )


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 62:
        raise InvalidRequest("the id of a dead letter is a number")
    return int(text)


def stored_copy(pushed: ItemOutcome) -> StoredCopy:
    return StoredCopy(pushed.status, str(pushed.partition_id), pushed.transaction_id)
