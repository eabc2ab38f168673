"""`penstock queue dlq`: look at dead letters, deliver them again, or delete them."""

import time
from typing import Annotated, Any

import typer
from rich.console import Console

from penstock.cli import (
    LOCAL_URL,
    Commands,
    Json,
    Token,
    Url,
    Watch,
    Yes,
    ask,
    broker,
    confirm,
    resource,
)
from penstock.cli.queue import commands, complete_queue
from penstock.cli.queue_groups import _shown
from penstock.cli.tables import Column, Line, Table, View, count, print_json, show, when
from penstock.cli.tables import table as table_of
from penstock.errors import PenstockError

dead_letters = Commands("List, requeue and delete dead letters.", commands, name="dlq")
DEAD, TASKS = "/api/v1/dlq", "/api/v1/tasks"
DONE = {"requeue": "requeued", "purge": "deleted"}
POLL_SECONDS = 0.2
Queue = Annotated[
    str | None,
    typer.Argument(help="Queue; default: all.", autocompletion=complete_queue),
]
Group = Annotated[
    str | None, typer.Option("--group", "-g", help="Only dead letters of this consumer group.")
]
Partition = Annotated[
    str | None, typer.Option("--partition", "-p", help="Only dead letters of this partition.")
]
Error = Annotated[
    str | None, typer.Option("--error", help="Only dead letters whose error contains this text.")
]
Id = Annotated[
    int | None,
    typer.Option("--id", help="Only the dead letter with this id, as shown by `dlq list`."),
]


@dead_letters.command("list")
def dlq_list(
    queue: Queue = None,
    group: Group = None,
    partition: Partition = None,
    error: Error = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Most dead letters to show.")
    ] = 100,
    offset: Annotated[int, typer.Option(min=0, help="Skip this many.")] = 0,
    as_json: Json = False,
    watch: Watch = None,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """List dead letters, newest first.

    Examples:

    `penstock queue dlq list orders --group billing --json | jq '.[].data'`

    `penstock queue dlq list orders | cut -f1 | tail -n +2 | xargs -n1 penstock queue dlq requeue
    --yes --id`
    """

    def look() -> View:
        filters = _filter(queue, group, partition, error) | {"limit": limit, "offset": offset}
        page = ask(url, token, "GET", resource(DEAD, **filters))
        rows, total = page["messages"], page["total"]
        columns = (
            Column("id", "dlqId"),
            Column("queue"),
            Column("partition"),
            Column("group", lambda row: _shown(row["consumerGroup"])),
            Column("attempts", format=count),
            Column("failed at", "failedAt", when),
            Column("error", "errorMessage", prose=True),
        )
        more = [Line(f"{total:,} in all")] if total > len(rows) else []
        return View(rows, [Table(columns, rows, "no dead letters"), *more])

    show(look, as_json, watch)


@dead_letters.command("errors")
def dlq_errors(
    queue: Queue = None,
    group: Group = None,
    filter: Annotated[
        str, typer.Option("--filter", help="Only errors that contain this text.")
    ] = "",
    as_json: Json = False,
    watch: Watch = None,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Count dead letters by error, most frequent first.

    Example: `penstock queue dlq errors orders --filter timeout`
    """

    def look() -> View:
        query = {"queue": queue, "consumerGroup": group, "filter": filter or None}
        return table_of(
            ask(url, token, "GET", resource(DEAD, "errors", **query))["errors"],
            Column("count", format=count),
            Column("queue"),
            Column("group", lambda row: _shown(row["group"])),
            Column("first", format=when, optional=True),
            Column("last", format=when),
            Column("error", prose=True),
            empty="no dead letters",
        )

    show(look, as_json, watch)


@dead_letters.command("requeue")
def dlq_requeue(
    queue: Queue = None,
    group: Group = None,
    partition: Partition = None,
    error: Error = None,
    id: Id = None,
    yes: Yes = False,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Deliver dead letters again to the groups they failed in.

    Example: `penstock queue dlq requeue orders --group billing`
    """
    filters = _filter(queue, group, partition, error, id)
    confirm(f"Deliver {_matching(url, token, filters)} again?", yes)
    _do(url, token, "requeue", filters)


@dead_letters.command("purge")
def dlq_purge(
    queue: Queue = None,
    group: Group = None,
    partition: Partition = None,
    error: Error = None,
    id: Id = None,
    yes: Yes = False,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Permanently delete dead letters.

    Example: `penstock queue dlq purge orders --group billing --yes`
    """
    filters = _filter(queue, group, partition, error, id)
    confirm(f"Delete {_matching(url, token, filters)} for good?", yes)
    _do(url, token, "purge", filters)


def _filter(
    queue: str | None,
    group: str | None,
    partition: str | None,
    error: str | None,
    id: int | None = None,
) -> dict[str, Any]:
    filters = {"queue": queue, "consumerGroup": group, "partition": partition, "error": error}
    return filters | {"id": id}


def _matching(url: str, token: str, filters: dict[str, Any]) -> str:
    if filters["id"] is not None:
        return f"dead letter {filters['id']}"
    page = ask(url, token, "GET", resource(DEAD, **filters, limit=1))
    return f"{page['total']:,} dead letters of {filters['queue'] or 'all queues'}"


def _do(url: str, token: str, kind: str, filters: dict[str, Any]) -> None:
    """Have the broker do it in the background, and show how far it is. Ctrl-C leaves it at work."""
    if filters["id"] is not None:
        method, target = ("POST", f"{DEAD}/requeue") if kind == "requeue" else ("DELETE", DEAD)
        print_json(ask(url, token, method, resource(target, **filters)))
        return
    with broker(url, token) as caller, Console(stderr=True).status("") as line:
        task = caller.json("POST", resource(TASKS, kind, **filters))
        while task["state"] == "running":  # asked on one connection: it is a task of that broker
            line.update(f"{task['done']:,} of {task['total']:,}")
            time.sleep(POLL_SECONDS)
            task = caller.json("GET", resource(TASKS, task["id"]))
    print_json({DONE[kind]: task["done"], "state": task["state"]})
    if task["state"] != "finished":
        raise PenstockError(task["error"] or f"it was {task['state']}")
