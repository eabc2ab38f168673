"""Dead letters: look, deliver again, delete."""

from typing import Annotated, Any

import msgspec

from penstock.errors import NotFound
from penstock.protocol.times import time_field
from penstock.queues.dead import DeadLetter, Which
from penstock.queues.engine import Queues
from penstock.wire.auth import Role
from penstock.wire.http.api.bodies import Offset, answer, check_offset, headers_of
from penstock.wire.http.messages import Request, Response
from penstock.wire.http.routes import Audited, route


class Filter(msgspec.Struct, rename="camel", frozen=True):
    queue: str | None = None
    consumer_group: str | None = None
    partition: str | None = None
    from_: str | None = msgspec.field(name="from", default=None)
    to: str | None = None
    id: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    error: str | None = None  # part of the error's text

    def which(self) -> Which:
        return Which(
            queue=self.queue or None,
            group=self.consumer_group or None,
            partition=self.partition or None,
            since=time_field(self.from_, "from") if self.from_ else None,
            until=time_field(self.to, "to") if self.to else None,
            id=self.id,
            error=self.error or None,
        )


class Page(Filter, frozen=True):
    limit: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 100
    before: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    offset: Offset = 0

    def __post_init__(self) -> None:
        check_offset(self.offset, "read on with before=<dlqId of the last one>")


class DeadLettersApi:
    """Dead letters."""

    tag = "dead letters"

    def __init__(self, queues: Queues) -> None:
        self._dead = queues.dead

    @route(
        "GET",
        "/api/v1/dlq",
        query=Page,
        answer=dict[str, Any],
        summary="Dead letters, the newest first",
    )
    async def page(self, request: Request) -> Response:
        args = request.args
        page = await self._dead.listing(args.which(), args.limit, args.offset, args.before)
        pagination = {"limit": args.limit, "offset": args.offset, "total": page.total}
        letters = [_letter(letter) for letter in page.letters]
        return answer({"messages": letters, "total": page.total, "pagination": pagination})

    @route(
        "POST",
        "/api/v1/dlq/requeue",
        query=Filter,
        answer=dict[str, Any],
        summary="Deliver those that match again",
        audit=Audited("deadletters.requeue", answer=("requeued",)),
    )
    async def requeue(self, request: Request) -> Response:
        return answer(
            {
                "success": True,
                "requeued": _found(request.args, await self._dead.requeue(request.args.which())),
            }
        )

    @route(
        "DELETE",
        "/api/v1/dlq",
        query=Filter,
        answer=dict[str, Any],
        summary="Delete those that match",
        role=Role.ADMIN,
        audit=Audited("deadletters.purge", answer=("deleted",)),
    )
    async def purge(self, request: Request) -> Response:
        return answer(
            {
                "success": True,
                "deleted": _found(request.args, await self._dead.purge(request.args.which())),
            }
        )


def _found(wanted: Filter, count: int) -> int:
    if wanted.id is not None and not count:
        raise NotFound("Dead letter not found")
    return count


def _letter(letter: DeadLetter) -> dict[str, Any]:
    omitted = {"dataOmitted": True} if letter.payload is None else {}
    return (
        omitted
        | headers_of(letter.headers)
        | {
            "dlqId": letter.number,
            "id": letter.message_id,
            "transactionId": letter.transaction_id,
            "partitionId": letter.partition_id,
            "queue": letter.queue,
            "partition": letter.partition,
            "consumerGroup": letter.group,
            "errorMessage": letter.error,
            "retryCount": max(0, letter.attempts - 1),
            "attempts": letter.attempts,
            "data": letter.payload,
            "producerSub": letter.producer,
            "createdAt": letter.created_at,
            "failedAt": letter.failed_at,
        }
    )
