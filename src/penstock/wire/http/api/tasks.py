"""Background tasks over HTTP: begin, look, cancel."""

from typing import Any

import msgspec

from penstock.contract.operation import Audited
from penstock.contract.queries import DeadLetterQuery
from penstock.monitor.audit import Audit
from penstock.monitor.tasks import Kind, Task, Tasks
from penstock.queues.engine import Queues
from penstock.wire.auth import Role
from penstock.wire.http.api.deadletters import which
from penstock.wire.http.audit import object_of
from penstock.wire.http.messages import Request
from penstock.wire.http.routes import route

TASKS = "/api/v1/tasks"


class TaskList(msgspec.Struct):
    tasks: list[Task]


class TasksApi:
    tag = "dead letters"

    def __init__(self, queues: Queues, broker: str, audit: Audit) -> None:
        self._audit = audit
        self.tasks = Tasks(queues, broker, self._ended)

    @route("GET", TASKS)
    async def everything(self) -> TaskList:
        """List background tasks of all brokers on this database, newest first."""
        return TaskList(await self.tasks.all())

    @route("GET", f"{TASKS}/{{id}}")
    async def one(self, id: str) -> Task:
        """Progress of a background task."""
        return await self.tasks.get(id)

    @route(
        "POST",
        f"{TASKS}/requeue",
        status=202,
        audit=Audited("deadletters.requeue", answer=("total",)),
    )
    async def requeue(self, request: Request, args: DeadLetterQuery) -> Task:
        """Requeue the dead letters that match, in the background."""
        return await self._begin("requeue", args, request.who)

    @route(
        "POST",
        f"{TASKS}/purge",
        status=202,
        role=Role.ADMIN,
        audit=Audited("deadletters.purge", answer=("total",)),
    )
    async def purge(self, request: Request, args: DeadLetterQuery) -> Task:
        """Delete the dead letters that match, in the background."""
        return await self._begin("purge", args, request.who)

    @route(
        "DELETE", f"{TASKS}/{{id}}", audit=Audited("task.cancel", answer=("kind", "what", "done"))
    )
    async def cancel(self, id: str) -> Task:
        """Cancel a background task; what it has already done is not undone."""
        return await self.tasks.cancel(id)

    async def _begin(self, kind: Kind, args: DeadLetterQuery, by: str) -> Task:
        named = {
            "queue": args.queue,
            "partition": args.partition,
            "consumerGroup": args.consumer_group,
        }
        what = object_of(named) or "all queues"
        if args.error:
            what = f"{what}, error contains {args.error[:100]!r}"
        return await self.tasks.start(kind, which(args), what, by)

    async def _ended(self, task: Task) -> None:
        detail: dict[str, Any] = {"done": task.done, "state": task.state}
        if task.error:
            detail["error"] = task.error
        await self._audit.record(task.who, f"deadletters.{task.kind}.ended", task.what, detail)
