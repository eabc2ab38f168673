"""`penstock topic status`, `groups`, `seek` and `forget`: topics as a broker sees them, and their
consumer groups.
"""

from typing import Annotated, Any

import typer

from penstock.cli import Api, Yes, argument, completer, confirm, option, usage
from penstock.cli.tables import Column, View, count, duration, rate, size, table
from penstock.cli.topic import commands

TOPICS = "/topics"
Address = Annotated[str, argument("The topic and the consumer group.", metavar="TOPIC@GROUP")]


@commands.command(watch=True)
def status(
    api: Api,
    filter: Annotated[str, argument("Only topics whose name contains this text.")] = "",
    sort: Annotated[
        str, option("Sort by a field of --json, such as bytes; -bytes sorts the largest first.")
    ] = "name",
) -> View:
    """Show the topics with their size, offsets and damage.

    Example: `penstock topic status --sort -bytes --watch`
    """
    return table(
        api.rows(TOPICS, "topics", details="true", filter=filter, sort=sort),
        Column("topic", "name"),
        Column("records", format=count),
        Column("size", "bytes", size),
        Column("records/s", "rate", rate),
        Column("groups", format=count, optional=True),
        Column("worst lag", "worstLag", count, optional=True),
        Column("damaged", format=count),
        Column("segments", format=count, optional=True),
        Column("policy", optional=True),
        Column("first", "firstOffset", count, optional=True),
        Column("next", "nextOffset", count, optional=True),
        empty="no topics; one is made by: penstock topic create orders",
    )


@commands.command(watch=True)
def groups(
    api: Api,
    topic: Annotated[
        str | None,
        argument(
            "Name of the topic; default: all topics.",
            metavar="[TOPIC]",
            autocompletion=completer(TOPICS, ""),
        ),
    ] = None,
) -> View:
    """Show consumer groups of topics: offsets, lag and members.

    Example: `penstock topic groups orders --watch`
    """
    names = [topic] if topic else api.get(TOPICS)
    return table(
        [row for name in names for row in api.get(TOPICS, name, "groups")],
        Column("topic"),
        Column("group"),
        Column("committed", format=count),
        Column("lag", format=count),
        Column("lag time", lambda row: row.get("lag_seconds") or None, duration),
        Column("leases", lambda row: len(row["leases"]), count),
        Column("members", _members, prose=True),
        empty="no groups; reading as one makes it: penstock topic consume orders -g billing",
    )


def _members(row: dict[str, Any]) -> str:
    return ", ".join(sorted({lease["member"] for lease in row["leases"]}))


@commands.command()
def seek(
    api: Api,
    address: Address,
    to: Annotated[
        str,
        argument("New position: earliest, latest, an offset, or a time such as @2026-01-31T12:00."),
    ],
    yes: Yes = False,
) -> None:
    """Set the offset at which a consumer group resumes. First shows how many records this would
    deliver again or skip, and asks for confirmation. Leases of its members become invalid.

    Example: `penstock topic seek orders@billing @2026-01-31T12:00`
    """
    topic, group = _parsed(address)
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
    typer.echo(f"{group} is at offset {offset:,} of {topic}, {done['lag']:,} behind", err=True)


def _place(to: str) -> dict[str, Any]:
    if to.isdecimal():
        return {"offset": int(to)}
    if to in ("earliest", "beginning", "latest", "end"):
        return {"to": "beginning" if to in ("earliest", "beginning") else "end"}
    if to.startswith("@"):
        return {"at": to[1:]}
    raise usage(f"{to!r} is no place: earliest, latest, an offset, or @time")


@commands.command()
def forget(api: Api, address: Address, yes: Yes = False) -> None:
    """Delete a consumer group of a topic: its offset and leases. Records are kept.

    Example: `penstock topic forget orders@billing`
    """
    topic, group = _parsed(address)
    confirm(f"Delete group {group} of topic {topic}? It would begin as a new group does.", yes)
    api.delete(TOPICS, topic, "groups", group)


def _parsed(address: str) -> tuple[str, str]:
    topic, _, group = address.rpartition("@")
    if not topic or not group:
        raise usage("name the topic and the group: topic@group")
    return topic, group
