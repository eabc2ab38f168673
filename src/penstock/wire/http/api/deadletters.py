"""Dead letters: look, deliver again, delete."""

from datetime import datetime
from typing import Annotated

import msgspec

from penstock.errors import NotFound
from penstock.monitor.inspection import preview_of
from penstock.protocol.answers import Body, PaginationOf
from penstock.queues.admin.dead_letters import DeadLetter, Which
from penstock.queues.engine import Queues
from penstock.wire.auth import Role
from penstock.wire.http.answers import of
from penstock.wire.http.api.queries import Limit, Offset, TimesQuery, check_offset
from penstock.wire.http.routes import Audited, route


class Filter(TimesQuery, rename="camel", frozen=True):
    queue: str | None = None
    consumer_group: str | None = None
    partition: str | None = None
    id: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    error: str | None = None  # part of the error's text

    def which(self) -> Which:
        return Which(
            queue=self.queue or None,
            group=self.consumer_group or None,
            partition=self.partition or None,
            since=self.since,
            until=self.until,
            id=self.id,
            error=self.error or None,
        )


class Page(Filter, frozen=True):
    limit: Limit = 100
    before: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    offset: Offset = 0
    preview: bool = False  # the beginning of each payload as text instead of the payload

    def __post_init__(self) -> None:
        check_offset(self.offset, "read on with before=<dlqId of the last one>")


class Letter(Body, kw_only=True):
    """A dead letter."""

    dlq_id: int
    id: str
    transaction_id: str
    partition_id: str
    queue: str
    partition: str
    consumer_group: str | None  # null: it was deleted
    error_message: str
    retry_count: int
    attempts: int
    data: msgspec.Raw | None
    data_omitted: bool | msgspec.UnsetType = msgspec.UNSET  # true: the page has enough already
    preview: str | msgspec.UnsetType = msgspec.UNSET
    headers: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    producer_sub: str | None
    created_at: datetime
    failed_at: datetime


class Letters(Body):
    messages: list[Letter]
    total: int
    pagination: PaginationOf


class Requeued(Body):
    success: bool
    requeued: int


class Purged(Body):
    success: bool
    deleted: int


class DeadLettersApi:
    tag = "dead letters"

    def __init__(self, queues: Queues) -> None:
        self._dead = queues.dead

    @route("GET", "/api/v1/dlq")
    async def page(self, args: Page) -> Letters:
        """List dead letters, newest first."""
        page = await self._dead.listing(args.which(), args.limit, args.offset, args.before)
        letters = [_letter(letter) for letter in page.letters]
        if args.preview:
            for letter in letters:
                payload = b"" if letter.data is None else bytes(letter.data)
                letter.data, letter.preview = None, preview_of(payload)
        pagination = PaginationOf(args.limit, args.offset, page.total)
        return Letters(letters, page.total, pagination)

    @route(
        "POST", "/api/v1/dlq/requeue", audit=Audited("deadletters.requeue", answer=("requeued",))
    )
    async def requeue(self, args: Filter) -> Requeued:
        """Requeue the dead letters that match: deliver them again to the groups they failed in."""
        count = await self._dead.requeue(args.which())
        return Requeued(True, _matched(args, count))

    @route(
        "DELETE",
        "/api/v1/dlq",
        role=Role.ADMIN,
        audit=Audited("deadletters.purge", answer=("deleted",)),
    )
    async def purge(self, args: Filter) -> Purged:
        """Delete the dead letters that match."""
        count = await self._dead.purge(args.which())
        return Purged(True, _matched(args, count))


def _matched(wanted: Filter, count: int) -> int:
    if wanted.id is not None and not count:
        raise NotFound("Dead letter not found")
    return count


def _letter(letter: DeadLetter) -> Letter:
    return of(
        Letter,
        letter,
        dlq_id=letter.number,
        id=letter.message_id,
        consumer_group=letter.group,
        error_message=letter.error,
        retry_count=max(0, letter.attempts - 1),
        data=letter.payload,
        data_omitted=True if letter.payload is None else msgspec.UNSET,
        headers=msgspec.UNSET if letter.headers is None else letter.headers,
        producer_sub=letter.producer,
    )
