"""`penstock topic status`, `groups`, `seek` and `forget`: topics as a broker sees them, and their
consumer groups.
"""

from typing import Annotated, Any

import typer

from penstock.cli import (
    LOCAL_URL,
    Json,
    Token,
    Url,
    Watch,
    Yes,
    ask,
    completer,
    confirm,
    resource,
    usage,
)
from penstock.cli.tables import Column, View, count, duration, rate, show, size, table
from penstock.cli.topic import commands

TOPICS = "/topics"
PAGE_ROWS = 500  # topics asked for at a time
Address = Annotated[
    str, typer.Argument(metavar="TOPIC@GROUP", help="The topic and the consumer group.")
]


def topics(url: str, token: str, filter: str, sort: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while True:
        query = {"filter": filter, "sort": sort, "limit": PAGE_ROWS, "offset": len(rows)}
        page = ask(url, token, "GET", resource(TOPICS, details="true", **query))
        rows += page["topics"]
        if not page["topics"] or len(rows) >= page["total"]:
            return rows


@commands.command()
def status(
    filter: Annotated[str, typer.Argument(help="Only topics whose name contains this text.")] = "",
    sort: Annotated[
        str,
        typer.Option(
            help="Sort by a field of --json, such as bytes; -bytes sorts the largest first."
        ),
    ] = "name",
    json: Json = False,
    watch: Watch = None,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Show the topics with their size, offsets and damage.

    Example: `penstock topic status --sort -bytes --watch`
    """

    def look() -> View:
        return table(
            topics(url, token, filter, sort),
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

    show(look, json, watch)


@commands.command()
def groups(
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="[TOPIC]",
            help="Name of the topic; default: all topics.",
            autocompletion=completer(TOPICS, ""),
        ),
    ] = None,
    json: Json = False,
    watch: Watch = None,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Show consumer groups of topics: offsets, lag and members.

    Example: `penstock topic groups orders --watch`
    """

    def look() -> View:
        names = [topic] if topic else ask(url, token, "GET", TOPICS)
        rows = [row for name in names for row in ask(url, token, "GET", _groups(name))]
        return table(
            rows,
            Column("topic"),
            Column("group"),
            Column("committed", format=count),
            Column("lag", format=count),
            Column("lag time", lambda row: row.get("lag_seconds") or None, duration),
            Column("leases", lambda row: len(row["leases"]), count),
            Column("members", _members, prose=True),
            empty="no groups; reading as one makes it: penstock topic consume orders -g billing",
        )

    show(look, json, watch)


def _groups(topic: str, *more: str) -> str:
    return resource("/topics", topic, "groups", *more)


def _members(row: dict[str, Any]) -> str:
    return ", ".join(sorted({lease["member"] for lease in row["leases"]}))


@commands.command()
def seek(
    address: Address,
    to: Annotated[
        str,
        typer.Argument(
            help="New position: earliest, latest, an offset, or a time such as @2026-01-31T12:00."
        ),
    ],
    yes: Yes = False,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Set the offset at which a consumer group resumes. First shows how many records this would
    deliver again or skip, and asks for confirmation. Leases of its members become invalid.

    Example: `penstock topic seek orders@billing @2026-01-31T12:00`
    """
    topic, group = _parsed(address)
    target, where = _groups(topic, group, "reset"), _place(to)
    preview = ask(url, token, "POST", target, where | {"dryRun": True})
    before, offset = preview["before"], preview["committed"]
    confirm(
        f"Deliver offsets {offset:,} to {before:,} of {topic} again to {group}?"
        if offset <= before
        else f"Skip offsets {before:,} to {offset:,} of {topic} for {group}?",
        yes,
    )
    done = ask(url, token, "POST", target, where)
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
def forget(address: Address, yes: Yes = False, url: Url = LOCAL_URL, token: Token = "") -> None:
    """Delete a consumer group of a topic: its offset and leases. Records are kept.

    Example: `penstock topic forget orders@billing`
    """
    topic, group = _parsed(address)
    confirm(f"Delete group {group} of topic {topic}? It would begin as a new group does.", yes)
    ask(url, token, "DELETE", _groups(topic, group))


def _parsed(address: str) -> tuple[str, str]:
    topic, _, group = address.rpartition("@")
    if not topic or not group:
        raise usage("name the topic and the group: topic@group")
    return topic, group
