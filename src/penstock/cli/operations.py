"""`penstock tasks`, `maintenance`, `audit` and `logs`: watch and control a running broker."""

import json
from typing import Any, Literal

from penstock.cli import Limit, WatchApi, app
from penstock.cli.tables import Column, Facts, TextLine, View, count, table, when

TASKS, BUFFERS = "/api/v1/tasks", "/api/v1/buffers"
AUDIT_ROWS = 1000  # the most that one answer of the broker has


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


@app.command
def maintenance(
    switch: Literal["on", "off"] | None = None,
    /,
    *,
    pops: bool = False,
    api: WatchApi = WatchApi(),
) -> View:
    """Buffer pushes on disk, or stop pops, during maintenance of PostgreSQL.

    With `on`, pushes are accepted and buffered on disk. With `off`, buffered messages are written
    to the database. Without either, it shows whether maintenance is on.

    Examples:

    `penstock maintenance on`

    `penstock maintenance on --pops`

    `penstock maintenance off && penstock buffer status --watch`

    :param switch: Start or end maintenance; default: show its state.
    :param pops: Apply to pops instead of pushes: pops return no messages.
    """
    if switch is not None:
        modes = {"pop" if pops else "push": switch == "on"}
        answer = api.put(BUFFERS, "maintenance", body=modes)
        what = "pops" if pops else "pushes"
        return View(answer, [TextLine(f"maintenance of {what} is {switch}")])
    report = api.get("/api/v1/status/buffers")
    columns = (
        Column("pushes", lambda one: _goes(one["maintenanceMode"], "to the buffer")),
        Column("pops", lambda one: _goes(one["popMaintenanceMode"], "get no messages")),
        Column("buffered messages", "pending", count),
        Column("failed events", "failed", count),
        Column("database", lambda one: "up" if one["dbHealthy"] else "down"),
    )
    return View(report, [Facts(columns, report)])


def _goes(maintenance: bool, where: str) -> str:
    return where if maintenance else "as usual"


@app.command
def audit(filter: str = "", /, *, limit: Limit = 50, api: WatchApi = WatchApi()) -> View:
    """Show who changed what and when, newest first.

    Examples:

    `penstock audit orders -n 20`

    `penstock audit queue.delete --json | jq -r '.[].who'`

    :param filter: Show only entries with this text in who, action or object.
    :param limit: Most entries to show.
    """
    entries: list[dict[str, Any]] = []
    before = None
    while True:
        query = {"filter": filter, "before": before, "limit": min(limit, AUDIT_ROWS)}
        page = api.get("/api/v1/audit", **query)
        entries += page["entries"]
        before = page["next"]
        if before is None or len(entries) >= limit:
            break
    return table(
        entries[:limit],
        Column("at", format=when),
        Column("who"),
        Column("action"),
        Column("object"),
        Column("detail", _detail, prose=True, wrap=True),
        empty="nothing was changed yet",
        note="" if before is None else "there is more: --limit",
    )


def _detail(entry: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}"
        for name, value in entry["detail"].items()
    )


@app.command
def logs(*, level: str = "info", limit: Limit = 50, api: WatchApi = WatchApi()) -> View:
    """Show the latest log lines of the broker, newest last.

    Example: `penstock logs --level warning`

    :param level: Lowest level to show: info, warning or error.
    :param limit: Most lines to show.
    """
    return table(
        api.get("/api/v1/logs", level=level, limit=limit)["lines"][::-1],
        Column("at", format=when),
        Column("level"),
        Column("logger", optional=True),
        Column("message", prose=True, wrap=True),
        empty=f"no line of level {level} or above",
    )
