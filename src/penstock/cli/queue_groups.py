"""`penstock queue groups`, `seek` and `forget`: consumer groups of queues."""

from typing import Annotated, Any

from penstock.cli import Api, Yes, argument, confirm, option, usage
from penstock.cli.queue import commands, complete_queue, group_title
from penstock.cli.tables import Column, View, count, duration, print_json, table

GROUPS = "/api/v1/consumer-groups"
Address = Annotated[str, argument("The queue and the consumer group.", metavar="QUEUE@GROUP")]


@commands.command(watch=True)
def groups(
    api: Api,
    address: Annotated[
        str,
        argument(
            "A queue, to list its groups; or a group, to list its partitions; default: all.",
            metavar="[QUEUE | QUEUE@GROUP | @GROUP]",
            autocompletion=complete_queue,
        ),
    ] = "",
) -> View:
    """Show consumer groups and their lag.

    Examples:

    `penstock queue groups --watch`

    `penstock queue groups orders@billing`
    """
    queue, _, group = address.partition("@")
    if not group:
        return table(
            [row for row in api.get(GROUPS) if queue in ("", row["queueName"])],
            Column("group", lambda row: group_title(row["name"])),
            Column("queue", "queueName"),
            Column("lag", "totalLag", count),
            Column("lag time", "maxTimeLag", duration),
            Column("members", "members", count),
            Column("state"),
            Column("dead", "deadLetters", count),
            Column("partitions behind", "partitionsWithLag", count, optional=True),
            empty="no groups; a pop makes one: penstock queue pop orders@billing",
        )
    rows = [
        {"queue": name, **row}
        for name, about in api.get(GROUPS, group).items()
        if queue in ("", name)
        for row in about["partitions"]
    ]
    return table(
        rows,
        Column("queue"),
        Column("partition"),
        Column("lag", "offsetLag", count),
        Column("lag time", "timeLagSeconds", duration),
        Column("consumed", "totalConsumed", count),
        Column("leased", "leaseActive"),
    )


@commands.command(watch=True)
def consumers(
    api: Api,
    queue: Annotated[
        str,
        argument(
            "Name of the queue; default: all queues.",
            metavar="[QUEUE]",
            autocompletion=complete_queue,
        ),
    ] = "",
) -> View:
    """Show consumers that report their state: messages in flight and last error.

    Example: `penstock queue consumers orders --watch`
    """
    return table(
        api.get("/api/v1/consumers", queue=queue or None)["consumers"],
        Column("consumer", "name"),
        Column("queue"),
        Column("group", lambda row: group_title(row["group"])),
        Column("in flight", "inFlight", count),
        Column("at most", "concurrency", count, optional=True),
        Column("failed", format=count),
        Column("last error", "lastError", prose=True),
        empty="no consumer reports itself; those of `penstock worker` do",
    )


@commands.command()
def seek(
    api: Api,
    address: Address,
    to: Annotated[
        str, argument("New position: beginning, end, or a time such as 2026-01-31T12:00:00Z.")
    ],
    dry_run: Annotated[bool, option("Only show what would be delivered again or skipped.")] = False,
    yes: Yes = False,
) -> None:
    """Move a consumer group to another position in its queue.

    First shows what this would deliver again or skip, and asks for confirmation.

    Example: `penstock queue seek orders@billing 2026-01-31T12:00:00Z --dry-run`
    """
    queue, group = _parsed(address)
    target = (GROUPS, group, "queues", queue, "seek")
    ends = {"end": {"toEnd": True}, "beginning": {"toBeginning": True}}
    where: dict[str, Any] = ends.get(to, {"timestamp": to})
    preview = api.post(*target, body=where | {"dryRun": True})
    if dry_run:
        print_json(preview)
        return
    again, skipped = preview.get("redelivered", 0), preview.get("skipped", 0)
    confirm(
        f"{again:,} messages of {queue} would be delivered again to {group}, "
        f"{skipped:,} skipped. Go?",
        yes,
    )
    print_json(api.post(*target, body=where))


@commands.command()
def forget(api: Api, address: Address, yes: Yes = False) -> None:
    """Delete a consumer group of a queue: its cursor, leases and retries. Messages are kept.

    Example: `penstock queue forget orders@billing`
    """
    queue, group = _parsed(address)
    confirm(f"Delete group {group} of queue {queue}? A later pop begins as a new group does.", yes)
    print_json(api.delete(GROUPS, group, "queues", queue))


def _parsed(address: str) -> tuple[str, str]:
    queue, _, group = address.partition("@")
    if not queue or not group:
        raise usage("name the queue and the group: queue@group")
    return queue, group
