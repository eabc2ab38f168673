"""`penstock topic groups` and `seek`: consumer groups of topics."""

from collections.abc import Iterator
from typing import Annotated, Any

from cyclopts import Parameter

from penstock.cli import BrokerApi, WatchApi, Yes, confirm, say, usage
from penstock.cli.tables import Column, View, count, duration, table
from penstock.cli.topic import TOPICS, commands, complete_topic

TOPIC_GROUPS = "/api/v1/topic-groups"
OptionalName = Annotated[
    str, Parameter(help="Name of the topic; default: all topics.", completer=complete_topic)
]


@commands.command
def groups(topic: OptionalName = "", /, *, api: WatchApi = WatchApi()) -> View:
    """Show consumer groups of topics: offsets, lag and members.

    Example: `penstock topic groups orders --watch`
    """
    return table(
        api.get(TOPICS, topic, "groups") if topic else list(_all_groups(api)),
        Column("topic"),
        Column("group"),
        Column("committed", format=count),
        Column("lag", format=count),
        Column("lag time", lambda row: row.get("lag_seconds") or None, duration),
        Column("leases", lambda row: len(row["leases"]), count),
        Column("members", _members, prose=True),
        empty="no groups; reading as one makes it: penstock topic consume orders -g billing",
    )


def _all_groups(api: WatchApi) -> Iterator[dict[str, Any]]:
    page = api.get(TOPIC_GROUPS)
    while page:
        yield from page
        page = api.get(TOPIC_GROUPS, afterTopic=page[-1]["topic"], afterGroup=page[-1]["group"])


def _members(row: dict[str, Any]) -> str:
    return ", ".join(sorted({lease["member"] for lease in row["leases"]}))


@commands.command
def seek(address: str, to: str, /, *, yes: Yes = False, api: BrokerApi = BrokerApi()) -> None:
    """Set the offset at which a consumer group resumes. First shows how many records this would
    deliver again or skip, and asks for confirmation. Leases of its members become invalid.

    Example: `penstock topic seek orders@billing @2026-01-31T12:00`

    :param address: The topic and the consumer group, TOPIC@GROUP.
    :param to: New position: earliest, latest, an offset, or a time such as @2026-01-31T12:00.
    """
    topic, _, group = address.rpartition("@")
    if not topic or not group:
        raise usage("name the topic and the group: topic@group")
    target, where = (TOPICS, topic, "groups", group, "reset"), _place(to)
    preview = api.post(*target, body=where | {"dryRun": True})
    before, offset = preview["before"], preview["committed"]
    confirm(
        f"Deliver offsets {offset:,} to {before:,} of {topic} again to {group}?"
        if offset <= before
        else f"Skip offsets {before:,} to {offset:,} of {topic} for {group}?",
        yes,
    )
    done = api.post(*target, body=where)
    say(f"{group} is at offset {offset:,} of {topic}, {done['lag']:,} behind")


def _place(to: str) -> dict[str, Any]:
    if to.isdecimal():
        return {"offset": int(to)}
    if to in ("earliest", "beginning", "latest", "end"):
        return {"to": "beginning" if to in ("earliest", "beginning") else "end"}
    if to.startswith("@"):
        return {"at": to[1:]}
    raise usage(f"{to!r} is not a position: earliest, latest, an offset, or @time")
