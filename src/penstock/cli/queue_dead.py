"""`penstock queue dlq`: look at dead letters, deliver them again, or delete them."""

import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from rich.console import Console

from penstock.cli import Api, Commands, Yes, argument, confirm, option
from penstock.cli.queue import commands, complete_queue, group_title
from penstock.cli.tables import Column, View, count, print_json, table, when
from penstock.errors import PenstockError
from penstock.net.addresses import resource

dead_letters = Commands("List, requeue and delete dead letters.", commands, name="dlq")
DEAD, TASKS = "/api/v1/dlq", "/api/v1/tasks"
DONE = {"requeue": "requeued", "purge": "deleted"}
POLL_SECONDS = 0.2
Queue = Annotated[str | None, argument("Queue; default: all.", autocompletion=complete_queue)]
Group = Annotated[str | None, option("Only dead letters of this consumer group.", "-g")]


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    queue: Queue = None
    group: Group = None
    partition: Annotated[str | None, option("Only dead letters of this partition.", "-p")] = None
    error: Annotated[str | None, option("Only dead letters whose error contains this text.")] = None

    def query(self) -> dict[str, Any]:
        fields = asdict(self)
        return fields | {"consumerGroup": fields.pop("group")}


@dataclass(frozen=True, slots=True)
class Selected(DeadLetterFilter):
    id: Annotated[
        int | None, option("Only the dead letter with this id, as shown by `dlq list`.")
    ] = None


@dead_letters.command("list", watch=True)
def dlq_list(
    api: Api,
    selected: DeadLetterFilter,
    limit: Annotated[int, option("Most dead letters to show.", "-n", min=1)] = 100,
    offset: Annotated[int, option("Skip this many.", min=0)] = 0,
) -> View:
    """List dead letters, newest first.

    Examples:

    `penstock queue dlq list orders --group billing --json | jq '.[].data'`

    `penstock queue dlq list orders | cut -f1 | tail -n +2 | xargs -n1 penstock queue dlq requeue
    --yes --id`
    """
    page = api.get(DEAD, **selected.query(), limit=limit, offset=offset)
    rows, total = page["messages"], page["total"]
    return table(
        rows,
        Column("id", "dlqId"),
        Column("queue"),
        Column("partition"),
        Column("group", lambda row: group_title(row["consumerGroup"])),
        Column("attempts", format=count),
        Column("failed at", "failedAt", when),
        Column("error", "errorMessage", prose=True),
        empty="no dead letters",
        note=f"{total:,} in all" if total > len(rows) else "",
    )


@dead_letters.command("errors", watch=True)
def dlq_errors(
    api: Api,
    queue: Queue = None,
    group: Group = None,
    filter: Annotated[str, option("Only errors that contain this text.")] = "",
) -> View:
    """Count dead letters by error, most frequent first.

    Example: `penstock queue dlq errors orders --filter timeout`
    """
    query = {"queue": queue, "consumerGroup": group, "filter": filter or None}
    return table(
        api.get(DEAD, "errors", **query)["errors"],
        Column("count", format=count),
        Column("queue"),
        Column("group", lambda row: group_title(row["group"])),
        Column("first", format=when, optional=True),
        Column("last", format=when),
        Column("error", prose=True),
        empty="no dead letters",
    )


@dead_letters.command("requeue")
def dlq_requeue(api: Api, selected: Selected, yes: Yes = False) -> None:
    """Deliver dead letters again to the groups they failed in.

    Example: `penstock queue dlq requeue orders --group billing`
    """
    confirm(f"Deliver {_matching(api, selected)} again?", yes)
    _do(api, "requeue", selected)


@dead_letters.command("purge")
def dlq_purge(api: Api, selected: Selected, yes: Yes = False) -> None:
    """Permanently delete dead letters.

    Example: `penstock queue dlq purge orders --group billing --yes`
    """
    confirm(f"Delete {_matching(api, selected)} for good?", yes)
    _do(api, "purge", selected)


def _matching(api: Api, selected: Selected) -> str:
    if selected.id is not None:
        return f"dead letter {selected.id}"
    total = api.get(DEAD, **selected.query(), limit=1)["total"]
    return f"{total:,} dead letters of {selected.queue or 'all queues'}"


def _do(api: Api, kind: str, selected: Selected) -> None:
    """Have the broker do it in the background, and show how far it is. Ctrl-C leaves it at work."""
    if selected.id is not None:
        method, target = ("POST", f"{DEAD}/requeue") if kind == "requeue" else ("DELETE", DEAD)
        print_json(api.ask(method, target, **selected.query()))
        return
    with api.caller() as caller, Console(stderr=True).status("") as line:
        task = caller.json("POST", resource(TASKS, kind, **selected.query()))
        while task["state"] == "running":  # asked on one connection: it is a task of that broker
            line.update(f"{task['done']:,} of {task['total']:,}")
            time.sleep(POLL_SECONDS)
            task = caller.json("GET", resource(TASKS, task["id"]))
    print_json({DONE[kind]: task["done"], "state": task["state"]})
    if task["state"] != "finished":
        raise PenstockError(task["error"] or f"it was {task['state']}")
