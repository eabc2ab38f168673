"""Queues, their partitions, namespaces and tasks: configured, listed, emptied, deleted.

Nothing here counts rows: totals come from counters the engine keeps.
"""

import asyncio
import re
from typing import Any, ClassVar, TypeVar

import msgspec

from penstock.contract.noun import Noun, Pagination
from penstock.contract.operation import Audited
from penstock.contract.queries import Limit, Paged
from penstock.contract.queues import Configured, PartitionCounts, PartitionTimes, QueueNames
from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.queue_options import QueueOptions
from penstock.protocol.status import NOT_JSON
from penstock.queues.admin.status import QueueFilter, QueueStatus, QueueStatusPage, QueueTotals
from penstock.queues.engine import Queues
from penstock.queues.options import BY_NAME, OPTIONS, parse
from penstock.wire.auth import Role
from penstock.wire.http.answers import each, of, plain
from penstock.wire.http.decoding import body_decoder
from penstock.wire.http.messages import Request, Response, json_response
from penstock.wire.http.routes import route

PARTITIONS = "read on with GET /api/v1/resources/partitions?queue=...&after=<id of the last one>"


class ConfigureBody(msgspec.Struct):
    queue: str
    namespace: str | None = None
    task: str | None = None
    options: dict[str, msgspec.Raw] | None = None  # decoded one by one: an error names the option

    texts: ClassVar = {"queue": "queue is required", "options": "options must be an object"}


class Configure(ConfigureBody):
    """The configuration of a queue."""

    options: QueueOptions | None = None  # type: ignore[assignment]


class AboutOption(msgspec.Struct):
    """What an option means."""

    name: str
    default: int | bool | str
    meaning: str


class OptionsAnswer(msgspec.Struct):
    queue: str
    options: QueueOptions
    about: list[AboutOption]


class QueuesQuery(Paged, frozen=True):
    namespace: str | None = None
    task: str | None = None
    limit: Limit = 10_000
    cursor: str | None = None

    farther: ClassVar[str] = "read on with cursor=<next of the page before>"

    @property
    def wanted(self) -> QueueFilter:
        before = None if self.cursor is None else queue_number(self.cursor)
        return QueueFilter(self.namespace or None, self.task or None, before=before)


class PageQuery(Paged, frozen=True):
    limit: Limit = 1000

    farther: ClassVar[str] = PARTITIONS


class PartitionsQuery(Paged, frozen=True):
    queue: str | None = None
    limit: Limit = 100
    after: str | None = None

    farther: ClassVar[str] = PARTITIONS


class ClearQuery(msgspec.Struct, frozen=True):
    partition: str | None = None


class QueueCounts(PartitionCounts):
    scheduled: int  # for later


class SummaryCounts(QueueCounts):
    dropped: int


class QueueSummary(QueueNames):
    partitions: int
    messages: SummaryCounts


class QueueList(Noun):
    queues: list[QueueSummary]
    next: str | None  # the cursor of the page behind; null: there is none


class QueuePartition(PartitionTimes):
    stats: PartitionCounts


class QueueWithPartitions(QueueNames):
    partitions: list[QueuePartition]
    totals: QueueCounts


class DepthQuery(msgspec.Struct, frozen=True):
    group: str | None = None
    limit: Limit = 10_000


class Depth(Noun):
    """Messages that a group has not finished with."""

    pending: int  # all of them
    processing: int  # of them under a lease
    ready: int  # of them not under a lease


class PartitionDepth(Depth, kw_only=True):
    partition: str


class QueueDepth(Depth, kw_only=True):
    queue: str
    group: str | None
    partitions_pending: int  # of those that are listed
    partitions_ready: int
    partitions: list[PartitionDepth]


class QueueDeleted(Noun):
    deleted: bool
    queue: str
    existed: bool


class Cleared(Noun):
    success: bool
    queue: str
    partition: str | None
    deleted: int  # messages


class Partition(PartitionTimes):
    queue: str
    messages: int  # stored now


class PartitionPage(Noun):
    partitions: list[Partition]
    pagination: Pagination


class SumCounts(Noun):
    total: int = 0
    pending: int = 0


class Sums(Noun, kw_only=True):
    """Of the queues of a namespace or a task."""

    queues: int = 0
    partitions: int = 0
    messages: SumCounts = msgspec.field(default_factory=SumCounts)


class Namespace(Sums):
    namespace: str


class Namespaces(Noun):
    namespaces: list[Namespace]


class Task(Sums):
    task: str


class Tasks(Noun):
    tasks: list[Task]


S = TypeVar("S", bound=Sums)
_CURSOR = re.compile("[0-7]?[0-9a-f]{1,7}")
ABOUT = [AboutOption(option.name, option.default, option.meaning) for option in OPTIONS]
read_options = body_decoder(dict[str, msgspec.Raw])
read_configure = body_decoder(ConfigureBody)


class ResourcesApi:
    tag = "resources"

    def __init__(self, queues: Queues) -> None:
        self._admin = queues.admin
        self._status = queues.status
        self._catalog = queues.catalog

    @route(
        "POST",
        "/api/v1/configure",
        body=Configure,
        audit=Audited("queue.configure", body=("queue", "namespace", "task", "options")),
    )
    async def configure(self, request: Request) -> Configured:
        """Create a queue or replace its options."""
        body = read_configure(request.body)
        if not body.queue:
            raise InvalidRequest("queue is required")
        misplaced = [name for name in read_options(request.body) if name in BY_NAME]
        if misplaced:  # it would silently not be in force
            raise InvalidRequest(f"{', '.join(misplaced)} must be in options")
        options = parse({name: _option(name, raw) for name, raw in (body.options or {}).items()})
        configured = await self._admin.configure(body.queue, options, body.namespace, body.task)
        info = configured.queue
        return of(
            Configured,
            info,
            configured=True,
            queue_id=info.uuid,
            partition_id=configured.partition_id,
            queue=info.name,
        )

    @route("GET", "/api/v1/queues/{queue}/options")
    async def options(self, queue: str) -> OptionsAnswer:
        """The options of a queue and their meanings."""
        info = await self._catalog.queue(queue)
        if info is None:
            raise NotFound(f"queue '{queue}' does not exist")
        return OptionsAnswer(info.name, info.options, ABOUT)

    @route(
        "PATCH",
        "/api/v1/queues/{queue}/options",
        body=QueueOptions,
        audit=Audited("queue.configure", body=tuple(BY_NAME)),
    )
    async def change(self, request: Request, queue: str) -> OptionsAnswer:
        """Change some options of a queue and keep the others."""
        values = {name: _option(name, raw) for name, raw in read_options(request.body).items()}
        options = parse(values)
        only = {BY_NAME[name].field for name, value in values.items() if value is not None}
        changed = await self._admin.change(queue, options, only)
        return OptionsAnswer(queue, changed, ABOUT)

    @route("GET", "/api/v1/resources/queues")
    async def list_queues(self, args: QueuesQuery) -> QueueList | Response:
        """List queues, the newest first. Without `limit`, the newest 10,000."""
        page = await self._status.page(args.wanted, args.limit, args.offset)
        answer = QueueList(await summaries(page), next_cursor(page))
        return await asyncio.to_thread(lambda: json_response(plain(answer)))

    @route("GET", "/api/v1/resources/queues/{queue}")
    async def one(self, queue: str, args: PageQuery) -> QueueWithPartitions:
        """A queue and its partitions."""
        status = await self._status.queue(queue)
        rows = await self._status.partitions(status, args.limit, args.offset)
        return of(
            QueueWithPartitions,
            status.info,
            id=status.info.uuid,
            partitions=[
                of(QueuePartition, row, stats=of(PartitionCounts, row.counts)) for row in rows
            ],
            totals=of(QueueCounts, status.counts),
        )

    @route("GET", "/api/v1/resources/queues/{queue}/depth")
    async def depth(self, queue: str, args: DepthQuery) -> QueueDepth:
        """How many messages a group has not finished with, in the queue and in its partitions.
        Without `group`, that of the group that is farthest behind, or of queue mode if it is used.
        """
        status = await self._status.queue(queue)
        group = status.figures.seen_by(args.group)
        pending = group.waiting if group else status.figures.stored
        leased = group.leased if group else 0
        rows = await self._status.partitions(status, args.limit, group=args.group)
        partitions = [
            PartitionDepth(
                counts.pending + counts.processing,
                counts.processing,
                counts.pending,
                partition=row.name,
            )
            for row in rows
            for counts in (row.counts,)
        ]
        return QueueDepth(
            pending,
            leased,
            max(0, pending - leased),
            queue=queue,
            group=args.group,
            partitions_pending=sum(one.pending > 0 for one in partitions),
            partitions_ready=sum(one.ready > 0 for one in partitions),
            partitions=partitions,
        )

    @route(
        "DELETE",
        "/api/v1/resources/queues/{queue}",
        role=Role.ADMIN,
        audit=Audited("queue.delete", answer=("existed",)),
    )
    async def delete(self, queue: str) -> QueueDeleted:
        """Delete a queue with all its messages."""
        return QueueDeleted(True, queue, await self._admin.delete(queue))

    @route(
        "DELETE",
        "/api/v1/queues/{queue}/clear",
        role=Role.ADMIN,
        audit=Audited("queue.clear", answer=("deleted",)),
    )
    async def clear(self, queue: str, args: ClearQuery) -> Cleared:
        """Delete the messages of a queue or a partition and keep the queue."""
        partition = args.partition or None
        deleted = await self._admin.clear(queue, partition)
        return Cleared(True, queue, partition, deleted)

    @route("GET", "/api/v1/resources/partitions")
    async def partitions(self, args: PartitionsQuery) -> PartitionPage:
        """List partitions."""
        partitions = await self._admin.partitions(
            args.queue or None, args.limit, args.offset, args.after
        )
        page = Pagination(args.limit, args.offset)
        return PartitionPage(each(Partition, partitions), page)

    @route("GET", "/api/v1/resources/namespaces")
    async def namespaces(self) -> Namespaces:
        """List namespaces with their totals."""
        sums = await self._status.totals(QueueFilter(), lambda queue: queue.namespace)
        return Namespaces([_sums(Namespace, one, namespace=one.name) for one in sums if one.name])

    @route("GET", "/api/v1/resources/tasks")
    async def tasks(self) -> Tasks:
        """List tasks (labels of queues) with their totals."""
        sums = await self._status.totals(QueueFilter(), lambda queue: queue.task)
        return Tasks([_sums(Task, one, task=one.name) for one in sums if one.name])


def _option(name: str, raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except NOT_JSON as error:
        raise InvalidRequest(f"option {name[:60]} is not understood: {error}") from None


def summary(status: QueueStatus) -> QueueSummary:
    """A queue in a list."""
    counts = of(SummaryCounts, status.counts)
    return of(
        QueueSummary,
        status.info,
        id=status.info.uuid,
        partitions=status.partitions,
        messages=counts,
    )


async def summaries(page: QueueStatusPage) -> list[QueueSummary]:
    """The queues of a page. There may be many: beside the event loop."""
    return await asyncio.to_thread(lambda: [summary(status) for status in page.queues])


def next_cursor(page: QueueStatusPage) -> str | None:
    return None if page.next is None else f"{page.next:x}"


def queue_number(cursor: str) -> int:
    """The number in a cursor."""
    if not _CURSOR.fullmatch(cursor):
        raise InvalidRequest(f"{cursor[:20]!r} is not the `next` of a page of queues")
    return int(cursor, 16)


def _sums(kind: type[S], sums: QueueTotals, **name: str) -> S:
    counts = SumCounts(sums.counts.total, sums.counts.pending)
    return kind(queues=sums.queues, partitions=sums.partitions, messages=counts, **name)
