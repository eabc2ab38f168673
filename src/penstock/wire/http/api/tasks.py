"""Background tasks over HTTP: begin, look, cancel."""

from typing import Any

from penstock.contract import operations
from penstock.contract.queries import DeadLetterQuery
from penstock.contract.tasks import BackgroundTask, TaskKind
from penstock.monitor.audit import Audit
from penstock.monitor.tasks import Tasks
from penstock.queues.engine import Queues
from penstock.wire.http.api.deadletters import which
from penstock.wire.http.audit import object_of
from penstock.wire.http.messages import Request
from penstock.wire.http.routes import serves


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
