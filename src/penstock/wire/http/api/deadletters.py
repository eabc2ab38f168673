"""Dead letters: look, deliver again, delete."""

from penstock.contract import operations
from penstock.contract.dead_letters import DeadLetters, Purged, Requeued
from penstock.contract.noun import Pagination
from penstock.contract.queries import DeadLetterPageQuery, DeadLetterQuery
from penstock.errors import NotFound
from penstock.queues.admin.dead_letters import Which
from penstock.queues.engine import Queues
from penstock.wire.http.routes import serves


class DeadLettersApi:
    tag = "dead letters"

    def __init__(self, queues: Queues) -> None:
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


def which(args: DeadLetterQuery) -> Which:
    """The dead letters that a query means."""
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
