"""`penstock tasks`: what the broker does in the background after whoever asked has left."""

from typing import Annotated

import typer

from penstock.cli import Api, Commands, app, argument
from penstock.cli.tables import Column, View, count, table, when

TASKS = "/api/v1/tasks"
commands = Commands("Requeues and purges that run in the background.", app, name="tasks")


@commands.command("list", watch=True)
def list_tasks(api: Api) -> View:
    """List running and recently finished tasks with their progress, newest first.

    Example: `penstock tasks list --watch`
    """
    return table(
        api.get(TASKS)["tasks"],
        Column("id"),
        Column("task", "kind"),
        Column("state"),
        Column("done", format=count),
        Column("of", "total", count),
        Column("started", "startedAt", when, optional=True),
        Column("who", optional=True),
        Column("what", prose=True),
        Column("error", prose=True, optional=True),
        empty="no tasks; one begins with: penstock queue dlq requeue QUEUE",
    )


@commands.command()
def cancel(
    api: Api,
    id: Annotated[str, argument("Id of the task, as shown by `penstock tasks list`.")],
) -> None:
    """Cancel a task. What it has already done is not undone.

    Example: `penstock tasks cancel 0190b5a2-7c1e-7d2a-9f00-3b1c5d7e9f10`
    """
    task = api.delete(TASKS, id)
    typer.echo(
        f"{task['kind']} of {task['what']} is {task['state']}: "
        f"{task['done']:,} of {task['total']:,} done",
        err=True,
    )
