"""Queues, their partitions, namespaces and tasks: configured, listed, emptied, deleted.

Nothing here counts rows: totals come from counters the engine keeps.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, ClassVar

import msgspec

from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.queue_options import QueueOptions
from penstock.queues.engine import Queues
from penstock.queues.options import BY_NAME, OPTIONS, parse
from penstock.queues.status import QueueStatus
from penstock.wire.auth import Role
from penstock.wire.http.api.answers import Body, Pagination, answer, each, of
from penstock.wire.http.api.bodies import Paged, decoder
from penstock.wire.http.messages import Request, Response, json_response
from penstock.wire.http.routes import Audited, route

Limit = Annotated[int, msgspec.Meta(ge=0, le=10_000)]
PARTITIONS = "read on with GET /api/v1/resources/partitions?queue=...&after=<id of the last one>"


class ConfigureBody(msgspec.Struct):
    queue: str
    namespace: str | None = None
    task: str | None = None
    options: dict[str, msgspec.Raw] | None = None  # decoded one by one: an error names the option


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

    farther: ClassVar[str] = "name a namespace or a task"


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


class Configured(Body):
    configured: bool
    queue_id: str
    partition_id: str  # of the default partition
    queue: str
    namespace: str
    task: str
    options: QueueOptions


class PartitionCounts(Body):
    """Messages of a partition, by state."""

    total: int
    pending: int
    processing: int
    completed: int
    failed: int | None  # null: not known of a partition
    dead_letter: int


class QueueCounts(PartitionCounts):
    scheduled: int  # for later


class SummaryCounts(QueueCounts):
    dropped: int


class QueueSummary(Body):
    id: str
    name: str
    namespace: str
    task: str
    created_at: datetime
    partitions: int
    messages: SummaryCounts


class QueueList(Body):
    queues: list[QueueSummary]


class QueuePartition(Body):
    id: str
    name: str
    created_at: datetime
    oldest_message: datetime | None
    newest_message: datetime | None
    stats: PartitionCounts


class QueueWithPartitions(Body):
    id: str
    name: str
    namespace: str
    task: str
    created_at: datetime
    partitions: list[QueuePartition]
    totals: QueueCounts


class QueueDeleted(Body):
    deleted: bool
    queue: str
    existed: bool


class Cleared(Body):
    success: bool
    queue: str
    partition: str | None
    deleted: int  # messages


class Partition(Body):
    id: str
    name: str
    queue: str
    created_at: datetime
    messages: int  # stored now
    oldest_message: datetime | None
    newest_message: datetime | None


class PartitionPage(Body):
    partitions: list[Partition]
    pagination: Pagination


class SumCounts(Body):
    total: int = 0
    pending: int = 0


class Sums(Body, kw_only=True):
    """Of the queues of a namespace or a task."""

    queues: int = 0
    partitions: int = 0
    messages: SumCounts = msgspec.field(default_factory=SumCounts)


class Namespace(Sums):
    namespace: str


class Namespaces(Body):
    namespaces: list[Namespace]


class Task(Sums):
    task: str


class Tasks(Body):
    tasks: list[Task]


ABOUT = [AboutOption(option.name, option.default, option.meaning) for option in OPTIONS]
read_options = decoder(dict[str, msgspec.Raw], {})
read_configure = decoder(
    ConfigureBody, {"queue": "queue is required", "options": "options must be an object"}
)


class ResourcesApi:
    """Queues and their partitions."""

    tag = "resources"

    def __init__(self, queues: Queues) -> None:
        self._admin = queues.admin
        self._status = queues.status
        self._catalog = queues.catalog

    @route(
        "POST",
        "/api/v1/configure",
        body=Configure,
        decode=False,
        answer=Configured,
        summary="Create a queue or replace its options",
        audit=Audited("queue.configure", body=("queue", "namespace", "task", "options")),
    )
    async def configure(self, request: Request) -> Response:
        body = read_configure(request.body)
        if not body.queue:
            raise InvalidRequest("queue is required")
        misplaced = [
            name
            for name in msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])
            if name in BY_NAME
        ]
        if misplaced:  # it would silently not be in force
            raise InvalidRequest(f"{', '.join(misplaced)} must be in options")
        options = parse({name: _option(name, raw) for name, raw in (body.options or {}).items()})
        configured = await self._admin.configure(body.queue, options, body.namespace, body.task)
        info = configured.queue
        return answer(
            of(
                Configured,
                info,
                configured=True,
                queue_id=info.uuid,
                partition_id=configured.partition_id,
                queue=info.name,
            )
        )

    @route(
        "GET",
        "/api/v1/queues/{queue}/options",
        answer=OptionsAnswer,
        summary="The options of a queue and their meanings",
    )
    async def options(self, request: Request) -> Response:
        info = await self._catalog.queue(request.params["queue"])
        if info is None:
            raise NotFound(f"queue '{request.params['queue']}' does not exist")
        return json_response(OptionsAnswer(info.name, info.options, ABOUT))

    @route(
        "PATCH",
        "/api/v1/queues/{queue}/options",
        body=QueueOptions,
        decode=False,
        answer=OptionsAnswer,
        summary="Change some options of a queue and keep the others",
        audit=Audited("queue.configure", body=tuple(BY_NAME)),
    )
    async def change(self, request: Request) -> Response:
        given = read_options(request.body)
        queue = request.params["queue"]
        values = {name: _option(name, raw) for name, raw in given.items()}
        options = parse(values)
        only = {BY_NAME[name].field for name, value in values.items() if value is not None}
        changed = await self._admin.change(queue, options, only)
        return json_response(OptionsAnswer(queue, changed, ABOUT))

    @route(
        "GET",
        "/api/v1/resources/queues",
        query=QueuesQuery,
        answer=QueueList,
        summary="List all queues",
    )
    async def list_queues(self, request: Request) -> Response:
        args = request.args
        statuses = await self._status.queues(args.namespace or None, args.task or None)
        page = statuses[args.offset : args.offset + args.limit]
        return answer(QueueList([summary(status) for status in page]))

    @route(
        "GET",
        "/api/v1/resources/queues/{queue}",
        query=PageQuery,
        answer=QueueWithPartitions,
        summary="A queue and its partitions",
    )
    async def one(self, request: Request) -> Response:
        status = await self._status.queue(request.params["queue"])
        rows = await self._status.partitions(status, request.args.limit, request.args.offset)
        return answer(
            of(
                QueueWithPartitions,
                status.info,
                id=status.info.uuid,
                partitions=[
                    of(QueuePartition, row, stats=of(PartitionCounts, row.counts)) for row in rows
                ],
                totals=of(QueueCounts, status.counts),
            )
        )

    @route(
        "DELETE",
        "/api/v1/resources/queues/{queue}",
        answer=QueueDeleted,
        summary="Delete a queue with all its messages",
        role=Role.ADMIN,
        audit=Audited("queue.delete", answer=("existed",)),
    )
    async def delete(self, request: Request) -> Response:
        existed = await self._admin.delete(request.params["queue"])
        return answer(QueueDeleted(True, request.params["queue"], existed))

    @route(
        "DELETE",
        "/api/v1/queues/{queue}/clear",
        query=ClearQuery,
        answer=Cleared,
        summary="Delete the messages of a queue or a partition and keep the queue",
        role=Role.ADMIN,
        audit=Audited("queue.clear", answer=("deleted",)),
    )
    async def clear(self, request: Request) -> Response:
        partition = request.args.partition or None
        deleted = await self._admin.clear(request.params["queue"], partition)
        return answer(Cleared(True, request.params["queue"], partition, deleted))

    @route(
        "GET",
        "/api/v1/resources/partitions",
        query=PartitionsQuery,
        answer=PartitionPage,
        summary="List partitions",
    )
    async def partitions(self, request: Request) -> Response:
        args = request.args
        partitions = await self._admin.partitions(
            args.queue or None, args.limit, args.offset, args.after
        )
        page = Pagination(args.limit, args.offset)
        return answer(PartitionPage(each(Partition, partitions), page))

    @route(
        "GET",
        "/api/v1/resources/namespaces",
        answer=Namespaces,
        summary="List namespaces with their totals",
    )
    async def namespaces(self, _: Request) -> Response:
        sums = _sums(await self._status.queues(), lambda queue: queue.info.namespace)
        return answer(Namespaces([of(Namespace, sum_, namespace=name) for name, sum_ in sums]))

    @route(
        "GET",
        "/api/v1/resources/tasks",
        answer=Tasks,
        summary="List tasks (labels of queues) with their totals",
    )
    async def tasks(self, _: Request) -> Response:
        sums = _sums(await self._status.queues(), lambda queue: queue.info.task)
        return answer(Tasks([of(Task, sum_, task=name) for name, sum_ in sums]))


def _option(name: str, raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
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


def _sums(
    queues: list[QueueStatus], name_of: Callable[[QueueStatus], str]
) -> list[tuple[str, Sums]]:
    """Over the queues that have a name, by name."""
    sums: dict[str, Sums] = {}
    for queue in queues:
        if name := name_of(queue):
            row = sums.setdefault(name, Sums())
            row.queues += 1
            row.partitions += queue.partitions
            row.messages.total += queue.counts.total
            row.messages.pending += queue.counts.pending
    return sorted(sums.items())
