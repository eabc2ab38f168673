"""`penstock queue dlq`: list dead letters, deliver them again, or delete them."""

import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console

from penstock.cli import BrokerApi, Limit, NotNegative, WatchApi, Yes, confirm
from penstock.cli.queue import commands, complete_queue, group_title
from penstock.cli.tables import Column, View, count, print_json, table, when
from penstock.errors import PenstockError
from penstock.net.addresses import resource

dead_letters = App(name="dlq", help="List, requeue and delete dead letters.")
commands.command(dead_letters)
DEAD, TASKS = "/api/v1/dlq", "/api/v1/tasks"
DONE = {"requeue": "requeued", "purge": "deleted"}
POLL_SECONDS = 0.2
Queue = Annotated[str | None, Parameter(help="Queue; default: all.", completer=complete_queue)]


@Parameter(name="*")
@dataclass(frozen=True)
class DeadLetterOptions:
    group: Annotated[
        str | None, Parameter(alias="-g", help="Only dead letters of this consumer group.")
    ] = None
    partition: Annotated[
        str | None, Parameter(alias="-p", help="Only dead letters of this partition.")
    ] = None
    error: Annotated[
        str | None, Parameter(help="Only dead letters whose error contains this text.")
    ] = None

    def query(self, queue: str | None) -> dict[str, Any]:
        fields = asdict(self)
        return fields | {"queue": queue, "consumerGroup": fields.pop("group")}


@dataclass(frozen=True)
class SelectedDeadLetters(DeadLetterOptions):
    id: Annotated[
        int | None, Parameter(help="Only the dead letter with this id, as shown by `dlq list`.")
    ] = None


@dead_letters.command(name="list")
def dlq_list(
    queue: Queue = None,
    /,
    *,
    selected: DeadLetterOptions = DeadLetterOptions(),
    by_error: bool = False,
    limit: Limit = 100,
    offset: Annotated[int, Parameter(validator=NotNegative)] = 0,
    api: WatchApi = WatchApi(),
) -> View:
    """List dead letters, newest first, or count them by error.

    Examples:

    `penstock queue dlq list orders --group billing --json | jq '.[].data'`

    `penstock queue dlq list orders --by-error`

    :param by_error: Count dead letters by error, most frequent first.
    :param limit: Most dead letters to show.
    :param offset: Skip this many.
    """
    if by_error:
        return _by_error(api, queue, selected)
    page = api.get(DEAD, **selected.query(queue), limit=limit, offset=offset)
    rows, total = page["messages"], page["total"]
    return table(
        rows,
        Column("id", "number"),
        Column("queue"),
        Column("partition"),
        Column("group", lambda row: group_title(row["group"])),
        Column("attempts", format=count),
        Column("failed at", "failedAt", when),
        Column("error", prose=True),
        empty="no dead letters",
        note=f"{total:,} in all" if total > len(rows) else "",
    )


def _by_error(api: BrokerApi, queue: str | None, selected: DeadLetterOptions) -> View:
    query = {"queue": queue, "consumerGroup": selected.group, "filter": selected.error}
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


@dead_letters.command(name="requeue")
def dlq_requeue(
    queue: Queue = None,
    /,
    *,
    selected: SelectedDeadLetters = SelectedDeadLetters(),
    yes: Yes = False,
    api: BrokerApi = BrokerApi(),
) -> None:
    """Deliver dead letters again to the groups they failed in.

    Example: `penstock queue dlq requeue orders --group billing`
    """
    confirm(f"Deliver {_matching(api, queue, selected)} again?", yes)
    _do(api, "requeue", queue, selected)


@dead_letters.command(name="purge")
def dlq_purge(
    queue: Queue = None,
    /,
    *,
    selected: SelectedDeadLetters = SelectedDeadLetters(),
    yes: Yes = False,
    api: BrokerApi = BrokerApi(),
) -> None:
    """Permanently delete dead letters.

    Example: `penstock queue dlq purge orders --group billing --yes`
    """
    confirm(f"Delete {_matching(api, queue, selected)} for good?", yes)
    _do(api, "purge", queue, selected)


def _matching(api: BrokerApi, queue: str | None, selected: SelectedDeadLetters) -> str:
    if selected.id is not None:
        return f"dead letter {selected.id}"
    total = api.get(DEAD, **selected.query(queue), limit=1)["total"]
    return f"{total:,} dead letters of {queue or 'all queues'}"


def _do(api: BrokerApi, kind: str, queue: str | None, selected: SelectedDeadLetters) -> None:
    """Start a task of the broker, and show its progress. Ctrl-C does not stop the task."""
    query = selected.query(queue)
    if selected.id is not None:
        method, target = ("POST", f"{DEAD}/requeue") if kind == "requeue" else ("DELETE", DEAD)
        print_json(api.ask(method, target, **query))
        return
    with api.caller() as caller, Console(stderr=True).status("") as line:
        task = caller.json("POST", resource(TASKS, kind, **query))
        while task["state"] == "running":  # asked on one connection: it is a task of that broker
            line.update(f"{task['done']:,} of {task['total']:,}")
            time.sleep(POLL_SECONDS)
            task = caller.json("GET", resource(TASKS, task["id"]))
    print_json({DONE[kind]: task["done"], "state": task["state"]})
    if task["state"] != "finished":
        raise PenstockError(task["error"] or f"it was {task['state']}")
