"""`penstock tasks`: work that the broker does in the background."""

from penstock.cli import WatchApi, app
from penstock.cli.tables import Column, TextLine, View, count, table, when

TASKS = "/api/v1/tasks"


@app.command
def tasks(*, cancel: str | None = None, api: WatchApi = WatchApi()) -> View:
    """Show requeues and purges that run in the background, or cancel one.

    Examples:

    `penstock tasks --watch`

    `penstock tasks --cancel 0190b5a2-7c1e-7d2a-9f00-3b1c5d7e9f10`

    :param cancel: Cancel the task with this id. What it has already done is not undone.
    """
    if cancel is not None:
        task = api.delete(TASKS, cancel)
        return View(
            task,
            [
                TextLine(
                    f"{task['kind']} of {task['what']} is {task['state']}: "
                    f"{task['done']:,} of {task['total']:,} done"
                )
            ],
        )
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
