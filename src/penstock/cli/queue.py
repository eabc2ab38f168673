"""`penstock queue`: push, pop and look after queues from a shell.

Messages go to standard output as one JSON value per line and come from standard input the same way,
so commands compose. What is looked up is shown as `tables` says. Exit code 1 means the broker
refused or could not be reached, 2 wrong usage.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import typer

from penstock.cli import Api, Commands, Yes, app, argument, completer, confirm, option, usage
from penstock.cli.tables import (
    Column,
    Facts,
    Line,
    Table,
    View,
    count,
    duration,
    print_json,
    print_line,
    rate,
    table,
    when,
)
from penstock.errors import InvalidRequest
from penstock.protocol.names import QUEUE_MODE
from penstock.protocol.times import time_field

if TYPE_CHECKING:
    from penstock.client import SyncClient
    from penstock.client.messages import AckStatus

complete_queue = completer("/api/v1/queues", "queues", filtered=True)
Name = Annotated[
    str, argument("Name of the queue.", metavar="QUEUE", autocompletion=complete_queue)
]

commands = Commands("Push to, pop from and manage queues.", app, name="queue")


# Messages


@commands.command()
def push(
    api: Api,
    queue: Annotated[str, argument("Queue, or queue/partition.")],
    payloads: Annotated[
        list[str] | None,
        argument("Messages as JSON values; default: one per line of standard input."),
    ] = None,
    partition: Annotated[str | None, option("Partition to push to.", "-p")] = None,
    transaction_id: Annotated[
        str | None,
        option(
            "Id (transactionId) of a single message; a repeated push is not stored twice.", "-t"
        ),
    ] = None,
    header: Annotated[
        list[str] | None, option("Header as NAME=VALUE; may be repeated.", "-H")
    ] = None,
    delay: Annotated[
        float | None, option("Delay in seconds before the messages can be delivered.", min=0)
    ] = None,
    at: Annotated[
        str | None,
        option("Time from which the messages can be delivered, such as 2026-01-31T12:00:00Z."),
    ] = None,
    text: Annotated[bool, option("Read payloads as plain text instead of JSON.")] = False,
    batch: Annotated[int, option("Lines of standard input per request.", min=1)] = 500,
    quiet: Annotated[bool, option("Print nothing for stored messages.", "-q")] = False,
) -> None:
    """Push messages and print the result of each, one JSON object per line.

    Examples:

        penstock queue push orders '{"id": 7}' --partition c-1

        cat orders.jsonl | penstock queue push orders

        penstock queue push reminders '{"cart": 7}' --delay 3600 --header tenant=a
    """
    if transaction_id and len(payloads or []) != 1:
        raise usage("--transaction-id goes with exactly one payload")
    envelope: dict[str, Any] = {  # what the messages have in common
        "partition": partition,
        "headers": dict(map(_header, header or [])),
        "delay": delay,
        "deliver_at": None if at is None else _moment(at),
    }

    with _client(api) as client:
        for lines in _batches(payloads if payloads else _input(), batch):
            values = [line if text else _json(line) for line in lines]
            if transaction_id:
                results = [client.push(queue, values[0], transaction_id=transaction_id, **envelope)]
            else:
                results = client.push_many(queue, values, **envelope)
            if not quiet:
                for one in results:
                    about = {"transactionId": one.transaction_id, "id": one.message_id}
                    print_line({"status": one.status} | about)


@commands.command()
def pop(
    api: Api,
    address: Annotated[str, argument("queue, queue/partition or queue@group.")],
    batch: Annotated[int, option("Most messages per pop.", "-n", min=1)] = 1,
    wait: Annotated[float, option("Seconds to wait if there are no messages.", "-w")] = 0.0,
    follow: Annotated[bool, option("Keep popping until Ctrl-C; implies --ack.", "-f")] = False,
    ack: Annotated[bool, option("Acknowledge the printed messages.")] = False,
    data: Annotated[bool, option("Print only the payloads.", "-d")] = False,
) -> None:
    """Pop messages and print them, one JSON object per line.

    Without `--ack`, they stay leased until `penstock queue ack` acknowledges them or the lease
    expires.

    Examples:

        penstock queue pop orders@billing -n 10 --ack --data

        penstock queue pop orders -n 10 | tee work | ./handle && penstock queue ack < work
    """
    wait = max(wait, 30.0 if follow else 0.0)
    with _client(api) as client:
        while True:
            messages = client.pop(address, batch=batch, wait=wait, renew=False)
            for message in messages:
                print_line(message.raw if data else message)
            sys.stdout.flush()
            if messages and (ack or follow):
                client.ack(messages)
            if not follow:
                return


@commands.command("ack")
def ack_command(
    api: Api,
    status: Annotated[str, option("Outcome: completed, failed, retry or dlq.", "-s")] = "completed",
    error: Annotated[str | None, option("Error message, for messages that failed.", "-e")] = None,
) -> None:
    """Acknowledge messages read from standard input, as printed by `penstock queue pop`.

    Example: `penstock queue ack --status failed --error "no stock" < work.jsonl`
    """
    from penstock.client.sync import SyncMessage
    from penstock.errors import AckRefused

    messages = []
    for number, line in enumerate(_input(), 1):
        try:
            messages.append(msgspec.json.decode(line, type=SyncMessage))
        except msgspec.DecodeError as problem:
            raise usage(
                f"line {number} is no message as `penstock queue pop` prints it: {problem}"
            ) from None
    word = cast("AckStatus", status)  # the broker refuses any other
    with _client(api) as client:
        try:
            results = client.ack(messages, word, error=error) if messages else []
        except AckRefused as refused:
            for result in refused.results:
                print_line(result)
            raise
        for result in results:
            print_line(result)


# Queues

FIGURES = (
    Column("waiting", format=count),
    Column("leased", format=count, optional=True),
    Column("pushed/s", "pushedRate", rate),
    Column("delivered/s", "deliveredRate", rate),
    Column("oldest", lambda row: row["oldest"] or None, duration),
    Column("groups", lambda row: _number(row["groups"]), count),
    Column("dead letters", "deadLetters", count),
    Column("stored", format=count, optional=True),
    Column("namespace", optional=True),
    Column("task", optional=True),
)
GROUP_FIGURES = (
    Column("waiting", format=count),
    Column("lag time", lambda row: row["lagSeconds"] or None, duration),
    Column("leased", format=count),
    Column("completed", format=count),
    Column("failed", format=count),
    Column("dead letters", "deadLetters", count),
    Column("dropped", format=count),
    Column("per s", "rate", rate),
)


PARTITIONS = (
    Column("partition", "name"),
    Column("waiting", format=count),
    Column("stored", format=count),
    Column("leased", format=count),
    Column("oldest", format=duration, optional=True),
    Column("last push", "newest", duration, optional=True),
)


@commands.command("list", watch=True)
def list_command(
    api: Api,
    filter: Annotated[str, argument("Only queues whose name contains this text.")] = "",
    sort: Annotated[
        str, option("Sort by a field of --json, such as waiting; -waiting sorts the largest first.")
    ] = "name",
    limit: Annotated[int, option("Most queues to show; 0 = all.", "-n", min=0)] = 0,
) -> View:
    """List the queues with their counts and rates.

    Examples:

    `penstock queue list --sort -waiting -n 20 --watch`

    `penstock queue list --json | jq -r '.[] | select(.waiting > 1000) | .name'`
    """
    return table(
        api.rows("/api/v1/queues", "queues", limit, filter=filter, sort=sort),
        Column("queue", "name"),
        *FIGURES,
        empty="no queues; the first push makes one: penstock queue push orders '{\"id\": 1}'",
    )


def _number(groups: Any) -> int:
    return groups if isinstance(groups, int) else len(groups)


@commands.command(watch=True)
def describe(api: Api, queue: Name) -> View:
    """Show the counts, options, groups and partitions of a queue.

    Example: `penstock queue describe orders`
    """
    about = api.get("/api/v1/queues", queue)
    slowest = max(about["groups"], key=lambda one: one["waiting"], default={"name": ""})
    partitions = api.get("/api/v1/queues", queue, "partitions", group=slowest["name"])
    about.pop("history", None)
    facts = (
        Column("queue", "name"),
        Column("created", "createdAt", when),
        *FIGURES,
        *(Column(name, f"options.{name}") for name in about["options"]),
    )
    return View(
        about | {"partitions": partitions["partitions"]},
        [
            Facts(facts, about),
            Table(
                (Column("group", lambda row: group_title(row["name"])), *GROUP_FIGURES),
                about["groups"],
                f"no groups; a pop makes one: penstock queue pop {queue}@group",
            ),
            Line(f"partitions as {group_title(slowest['name'])} sees them:", "dim"),
            Table(PARTITIONS, partitions["partitions"], "no partitions"),
            *_more(partitions),
        ],
    )


def group_title(group: str) -> str:
    return "(queue mode)" if group in ("", QUEUE_MODE) else group


def _more(page: dict[str, Any]) -> Iterator[Line]:
    if page["total"] > len(page["partitions"]):
        yield Line(f"{page['total']:,} partitions in all, those with the largest lag are shown")


@commands.command()
def configure(
    api: Api,
    queue: Annotated[str, argument("Name of the queue; created if it does not exist.")],
    options: Annotated[
        list[str] | None, argument("Options as NAME=VALUE, such as leaseTime=30.")
    ] = None,
    namespace: Annotated[str, option("Namespace of the queue.")] = "",
    task: Annotated[str, option("Task of the queue.")] = "",
) -> None:
    """Create a queue or replace its options. Options that you leave out return to their defaults.

    Example: `penstock queue configure orders leaseTime=30 retryLimit=5 ordering=none`
    """
    values = _options(options or [])
    body = {"queue": queue, "namespace": namespace, "task": task, "options": values}
    print_json(api.post("/api/v1/configure", body=body))


@commands.command("set")
def set_command(
    api: Api,
    queue: Name,
    options: Annotated[list[str], argument("Options as NAME=VALUE, such as leaseTime=30.")],
) -> None:
    """Change some options of a queue and keep the others.

    Example: `penstock queue set orders leaseTime=30 retryLimit=5`
    """
    print_json(api.ask("PATCH", "/api/v1/queues", queue, "options", body=_options(options)))


def _options(words: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise usage(f"{word}: expected option=value")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


@commands.command()
def delete(
    api: Api,
    queue: Name,
    yes: Yes = False,
    keep: Annotated[bool, option("Delete only the messages and keep the queue.")] = False,
) -> None:
    """Delete a queue with its messages, groups and dead letters.

    Example: `penstock queue delete scratch --yes`
    """
    confirm(f"Delete {'the messages of ' if keep else ''}queue {queue} for good?", yes)
    if keep:
        print_json(api.delete("/api/v1/queues", queue, "clear"))
    elif not api.delete("/api/v1/resources/queues", queue)["existed"]:
        typer.echo(f"there was no queue {queue}", err=True)


# What they share


def _client(api: Api) -> "SyncClient":
    from penstock.client import SyncClient

    return SyncClient(api.url, token=api.token, retry_for=5.0)


def _input() -> Iterator[str]:
    return (line for line in map(str.strip, sys.stdin) if line)


def _moment(text: str) -> datetime:
    try:
        return time_field(text, "--at")
    except InvalidRequest as error:
        raise usage(str(error)) from None


def _header(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise usage(f"--header wants name=value, not {text}")
    return name, value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _json(text: str) -> msgspec.Raw:
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise usage(f"not JSON: {text[:60]} ({error}); use --text for plain text") from None
    return msgspec.Raw(text.encode())


def _batches(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    remaining = iter(lines)
    return iter(lambda: list(islice(remaining, size)), [])


import penstock.cli.queue_dead  # noqa: E402
import penstock.cli.queue_groups  # noqa: E402
import penstock.cli.queue_messages  # noqa: E402, F401  # their commands join those above
