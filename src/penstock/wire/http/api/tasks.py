"""Background tasks over HTTP: begin, look, cancel."""

from typing import Any

import msgspec

from penstock.monitor.audit import Audit
from penstock.monitor.tasks import Kind, Task, Tasks
from penstock.queues.engine import Queues
from penstock.wire.auth import Role
from penstock.wire.http.api.deadletters import Filter
from penstock.wire.http.audit import object_of, who
from penstock.wire.http.messages import Request, Response, json_response
from penstock.wire.http.routes import Audited, route

TASKS = "/api/v1/tasks"


class TaskList(msgspec.Struct):
    tasks: list[Task]


class TasksApi:
    tag = "dead letters"

    def __init__(self, queues: Queues, broker: str, audit: Audit) -> None:
        self._audit = audit
        self.tasks = Tasks(queues, broker, self._ended)

    @route(
        "GET",
        TASKS,
        answer=TaskList,
        summary="List background tasks of all brokers on this database, newest first",
    )
    async def everything(self, _: Request) -> Response:
        return json_response(TaskList(await self.tasks.all()))

    @route("GET", f"{TASKS}/{{id}}", answer=Task, summary="Progress of a background task")
    async def one(self, request: Request) -> Response:
        return json_response(await self.tasks.get(request.params["id"]))

    @route(
        "POST",
        f"{TASKS}/requeue",
        query=Filter,
        answer=Task,
        status=202,
        summary="Requeue the dead letters that match, in the background",
        audit=Audited("deadletters.requeue", answer=("total",)),
    )
    async def requeue(self, request: Request) -> Response:
        return await self._begin("requeue", request)

    @route(
        "POST",
        f"{TASKS}/purge",
        query=Filter,
        answer=Task,
        status=202,
        summary="Delete the dead letters that match, in the background",
        role=Role.ADMIN,
        audit=Audited("deadletters.purge", answer=("total",)),
    )
    async def purge(self, request: Request) -> Response:
        return await self._begin("purge", request)

    @route(
        "DELETE",
        f"{TASKS}/{{id}}",
        answer=Task,
        summary="Cancel a background task; what it has already done is not undone",
        audit=Audited("task.cancel", answer=("kind", "what", "done")),
    )
    async def cancel(self, request: Request) -> Response:
        return json_response(await self.tasks.cancel(request.params["id"]))

    async def _begin(self, kind: Kind, request: Request) -> Response:
        args: Filter = request.args
        named = {
            "queue": args.queue,
            "partition": args.partition,
            "consumerGroup": args.consumer_group,
        }
        what = object_of(named) or "all queues"
        if args.error:
            what = f"{what}, error contains {args.error[:100]!r}"
        return json_response(
            await self.tasks.start(kind, args.which(), what, who(request)), status=202
        )

    async def _ended(self, task: Task) -> None:
        detail: dict[str, Any] = {"done": task.done, "state": task.state}
        if task.error:
            detail["error"] = task.error
        await self._audit.record(task.who, f"deadletters.{task.kind}.ended", task.what, detail)
