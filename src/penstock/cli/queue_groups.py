"""`penstock queue groups`, `consumers` and `seek`: consumer groups of queues."""

from typing import Annotated, Any

from cyclopts import Parameter

from penstock.cli import BrokerApi, WatchApi, Yes, confirm, usage
from penstock.cli.queue import GROUPS, commands, complete_queue, group_title
from penstock.cli.tables import Column, View, count, duration, print_json, table

Queue = Annotated[str, Parameter(completer=complete_queue)]


@commands.command
def groups(address: Queue = "", /, *, api: WatchApi = WatchApi()) -> View:
    """Show consumer groups and their lag.

    Examples:

    `penstock queue groups --watch`

    `penstock queue groups orders@billing`

    :param address: A QUEUE, to list its groups; or QUEUE@GROUP or @GROUP, to list the partitions of
        a group; default: all.
    """
    queue, _, group = address.partition("@")
    if not group:
        return table(
            api.get(GROUPS, queue=queue or None),
            Column("group", lambda row: group_title(row["name"])),
            Column("queue"),
            Column("waiting", format=count),
            Column("lag time", "lagSeconds", duration),
            Column("members", "members", count),
            Column("state"),
            Column("dead letters", "deadLetters", count),
            Column("partitions behind", "laggingPartitions", count, optional=True),
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
        Column("waiting", format=count),
        Column("lag time", "lagSeconds", duration),
        Column("consumed", format=count),
        Column("leased", lambda row: row["leaseId"] is not None),
    )


@commands.command
def consumers(queue: Queue = "", /, *, api: WatchApi = WatchApi()) -> View:
    """Show consumers that report their state: messages in flight and last error.

    Example: `penstock queue consumers orders --watch`

    :param queue: Name of the queue; default: all queues.
    """
    return table(
        api.get("/api/v1/consumers", queue=queue or None)["consumers"],
        Column("consumer", "name"),
        Column("queue"),
        Column("group", lambda row: group_title(row["group"])),
        Column("in flight", "inFlight", count),
        Column("oldest call", lambda row: row["inFlightSeconds"] or None, duration, optional=True),
        Column("at most", "concurrency", count, optional=True),
        Column("failed", format=count),
        Column("last error", "lastError", prose=True),
        empty="no consumer reports its state; those of `penstock worker` do",
    )


@commands.command
def seek(
    address: Queue,
    to: str,
    /,
    *,
    dry_run: bool = False,
    yes: Yes = False,
    api: BrokerApi = BrokerApi(),
) -> None:
    """Move a consumer group to another position in its queue.

    First shows what this would deliver again or skip, and asks for confirmation.

    Example: `penstock queue seek orders@billing 2026-01-31T12:00:00Z --dry-run`

    :param address: The queue and the consumer group, QUEUE@GROUP.
    :param to: New position: beginning, end, or a time such as 2026-01-31T12:00:00Z.
    :param dry_run: Only show what would be delivered again or skipped.
    """
    queue, _, group = address.partition("@")
    if not queue or not group:
        raise usage("name the queue and the group: queue@group")
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
        f"{skipped:,} skipped. Continue?",
        yes,
    )
    print_json(api.post(*target, body=where))
