"""`penstock queue`: push, pop and look after queues from a shell.

Data goes to standard output as one JSON value per line and comes from standard input the same way,
so commands compose; everything meant for people goes to standard error or, on a terminal, into
tables. Exit code 1 means the broker refused or could not be reached, 2 wrong usage.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from penstock.cli import LOCAL_URL, Token, Yes, app, confirm, errors_explained
from penstock.client import Address, Client, Message
from penstock.client.messages import AckRefused

T = TypeVar("T")

commands = typer.Typer(help="Push, pop and look after queues.", no_args_is_help=True)
dead_letters = typer.Typer(
    help="Look at dead letters, deliver them again, or delete them.", no_args_is_help=True
)
app.add_typer(commands, name="queue")
commands.add_typer(dead_letters, name="dlq")

Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="PENSTOCK_URL",
        help="Broker address; several with commas.",
        show_default=LOCAL_URL,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


# Messages


@commands.command()
def push(
    queue: Annotated[str, typer.Argument(help="Queue, or queue/partition.")],
    payloads: Annotated[
        list[str] | None, typer.Argument(help="JSON values; none = one per line of input.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", "-p", help="Partition to push to.")
    ] = None,
    transaction_id: Annotated[
        str | None,
        typer.Option("--transaction-id", "-t", help="Id of a single message; it is stored once."),
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Take payloads as plain text, not as JSON.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Lines per request.")] = 500,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing for stored messages.")
    ] = False,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Store messages; prints one JSON line per message with what became of it.

    Examples:

        penstock queue push orders '{"id": 7}' --partition c-1

        cat orders.jsonl | penstock queue push orders
    """
    if transaction_id and len(payloads or []) != 1:
        _usage("--transaction-id goes with exactly one payload")

    async def work(client: Client) -> None:
        for lines in _batches(payloads if payloads else _input(), batch):
            values = [line if text else _json(line) for line in lines]
            if transaction_id:
                results = [
                    await client.push(
                        queue, values[0], partition=partition, transaction_id=transaction_id
                    )
                ]
            else:
                results = await client.push_many(queue, values, partition=partition)
            if not quiet:
                for result in results:
                    _line(
                        {
                            "status": result.status,
                            "transactionId": result.transaction_id,
                            "id": result.message_id,
                        }
                    )

    _run(url, token, work)


@commands.command()
def pop(
    address: Annotated[str, typer.Argument(help="queue, queue/partition or queue@group.")],
    batch: Annotated[
        int, typer.Option("--batch", "-n", min=1, help="Most messages to take at once.")
    ] = 1,
    wait: Annotated[
        float, typer.Option("--wait", "-w", help="Seconds to wait when there are none.")
    ] = 0.0,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until interrupted; implies --ack.")
    ] = False,
    ack: Annotated[bool, typer.Option("--ack", help="Acknowledge what was printed.")] = False,
    data: Annotated[bool, typer.Option("--data", "-d", help="Print only the payloads.")] = False,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Take messages and print them, one JSON line each.

    Without `--ack` they stay leased to nobody in particular until `penstock queue ack` answers them
    or the lease ends.

    Examples:

        penstock queue pop orders@billing -n 10 --ack --data

        penstock queue pop orders -n 10 | tee work | ./handle && penstock queue ack < work
    """

    async def work(client: Client) -> None:
        while True:
            found = await client.pop(
                address, batch=batch, wait=max(wait, 30.0 if follow else 0.0), renew=False
            )
            for message in found:
                _line(message.raw if data else message)
            sys.stdout.flush()
            if found and (ack or follow):
                await client.ack(found)
            if not follow:
                return

    _run(url, token, work)


@commands.command("ack")
def ack_command(
    status: Annotated[
        str, typer.Option("--status", "-s", help="completed, failed, retry or dlq.")
    ] = "completed",
    error: Annotated[str | None, typer.Option("--error", "-e", help="What went wrong.")] = None,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Answer messages read from standard input, as `penstock queue pop` printed them.

    Example: `penstock queue ack --status failed --error "no stock" < work.jsonl`
    """

    async def work(client: Client) -> None:
        messages = []
        for number, line in enumerate(_input(), 1):
            try:
                messages.append(msgspec.json.decode(line, type=Message))
            except msgspec.DecodeError as problem:
                _usage(f"line {number} is no message as `penstock queue pop` prints it: {problem}")
        try:
            results = await client.ack(messages, status, error=error) if messages else []
        except AckRefused as refused:
            for result in refused.results:
                _line(result)
            raise
        for result in results:
            _line(result)

    _run(url, token, work)


# Queues


@commands.command("list")
def list_command(as_json: Json = False, url: Url = LOCAL_URL, token: Token = "") -> None:
    """List the queues with their counts.

    Example: `penstock queue list --json | jq -r '.[] | select(.messages.pending > 1000) | .name'`
    """
    found = _run(url, token, lambda client: client.queues())
    _show(
        found,
        as_json,
        ("queue", "namespace", "task", "partitions", "total", "pending", "processing"),
        lambda queue: (
            queue["name"],
            queue["namespace"],
            queue["task"],
            queue["partitions"],
            queue["messages"]["total"],
            queue["messages"]["pending"],
            queue["messages"]["processing"],
        ),
    )


@commands.command()
def describe(
    queue: Annotated[str, typer.Argument(help="Queue.")],
    as_json: Json = False,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Show a queue's options, counts and partitions.

    Example: `penstock queue describe orders`
    """
    found = _run(url, token, lambda client: client.describe(queue))
    if as_json or not sys.stdout.isatty():
        _line(found)
        return
    console = Console(soft_wrap=True)
    about = found["queue"]
    table = Table(box=None, show_header=False)
    for name in ("name", "namespace", "task", "priority", "createdAt"):
        table.add_row(name, str(about[name]))
    for name, value in about["config"].items():
        table.add_row(name, str(value))
    for name, value in found["totals"]["messages"].items():
        table.add_row(name, f"{value:,}")
    console.print(table)
    partitions = Table(
        "partition", "total", "pending", "processing", "completed", "dead letters", box=None
    )
    for partition in found["partitions"]:
        counts = partition["messages"]
        row = (
            counts[name] for name in ("total", "pending", "processing", "completed", "deadLetter")
        )
        partitions.add_row(partition["name"], *map(str, row))
    console.print(partitions)


@commands.command()
def configure(
    queue: Annotated[str, typer.Argument(help="Queue; created if there is none.")],
    options: Annotated[
        list[str] | None, typer.Argument(help="option=value, such as leaseTime=30.")
    ] = None,
    namespace: Annotated[str, typer.Option(help="Namespace of the queue.")] = "",
    task: Annotated[str, typer.Option(help="Task of the queue.")] = "",
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Create a queue or replace its options; options not named go back to their defaults.

    Example: `penstock queue configure orders leaseTime=30 retryLimit=5 ordering=none`
    """
    values: dict[str, Any] = {}
    for option in options or []:
        name, equals, value = option.partition("=")
        if not equals:
            _usage(f"{option}: expected option=value")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    _line(
        _run(
            url,
            token,
            lambda client: client.configure(queue, namespace=namespace, task=task, **values),
        )
    )


@commands.command()
def delete(
    queue: Annotated[str, typer.Argument(help="Queue.")],
    yes: Yes = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Delete the messages, keep the queue.")
    ] = False,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Delete a queue with its messages, groups and dead letters.

    Example: `penstock queue delete scratch --yes`
    """
    confirm(f"Delete {'the messages of ' if keep else ''}queue {queue} for good?", yes)
    if keep:
        _line(_run(url, token, lambda client: client.clear(queue)))
    elif not _run(url, token, lambda client: client.delete_queue(queue)):
        typer.echo(f"there was no queue {queue}", err=True)


# Groups


@commands.command()
def groups(
    group: Annotated[
        str | None, typer.Argument(help="One group, with its partitions; default: all groups.")
    ] = None,
    as_json: Json = False,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Show consumer groups and how far behind they are.

    Example: `penstock queue groups billing`
    """
    if group is None:
        _show(
            _run(url, token, lambda client: client.groups()),
            as_json,
            (
                "group",
                "queue",
                "partitions",
                "with lag",
                "behind (messages)",
                "behind (s)",
                "state",
            ),
            lambda row: (
                row["name"],
                row["queueName"],
                row["members"],
                row["partitionsWithLag"],
                row["totalLag"],
                row["maxTimeLag"],
                row["state"],
            ),
        )
        return
    found = _run(url, token, lambda client: client.group(group))
    rows = [
        {"queue": queue, **row} for queue, about in found.items() for row in about["partitions"]
    ]
    _show(
        rows,
        as_json,
        ("queue", "partition", "behind (messages)", "behind (s)", "consumed", "leased"),
        lambda row: (
            row["queue"],
            row["partition"],
            row["offsetLag"],
            row["timeLagSeconds"],
            row["totalConsumed"],
            row["leaseActive"],
        ),
    )


@commands.command()
def seek(
    address: Annotated[str, typer.Argument(help="queue@group.")],
    to: Annotated[
        str, typer.Argument(help="beginning, end, or a time such as 2026-01-31T12:00:00Z.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be delivered again.")
    ] = False,
    yes: Yes = False,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Move a group to another place in its queue.

    Shows first what that would deliver again or skip, and asks.

    Example: `penstock queue seek orders@billing 2026-01-31T12:00:00Z --dry-run`
    """
    where = Address.parse(address)
    if where.group is None:
        _usage("name the group as well: queue@group")
    preview = _run(
        url, token, lambda client: client.seek(where.queue, where.group or "", to, dry_run=True)
    )
    if dry_run:
        _line(preview)
        return
    again, skipped = preview.get("redelivered", 0), preview.get("skipped", 0)
    confirm(
        f"{again:,} messages of {where.queue} would be delivered again to {where.group}, "
        f"{skipped:,} skipped. Go?",
        yes,
    )
    _line(_run(url, token, lambda client: client.seek(where.queue, where.group or "", to)))


# Dead letters

Queue = Annotated[str | None, typer.Argument(help="Queue; default: all.")]
Group = Annotated[str | None, typer.Option("--group", "-g", help="Only of this consumer group.")]
Partition = Annotated[str | None, typer.Option("--partition", "-p", help="Only of this partition.")]
Id = Annotated[str | None, typer.Option("--id", help="Only the one with this dlqId.")]


@dead_letters.command("list")
def dlq_list(
    queue: Queue = None,
    group: Group = None,
    partition: Partition = None,
    limit: Annotated[int, typer.Option(min=1, help="Most to show.")] = 100,
    offset: Annotated[int, typer.Option(min=0, help="Skip this many.")] = 0,
    as_json: Json = False,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """List dead letters, the newest first.

    Example: `penstock queue dlq list orders --group billing --json | jq .data`
    """
    page = _run(
        url,
        token,
        lambda client: client.dead_letters(
            queue, consumer_group=group, partition=partition, limit=limit, offset=offset
        ),
    )
    if as_json:
        for message in page["messages"]:
            _line(message)
        return
    _show(
        page["messages"],
        False,
        ("id", "queue", "partition", "group", "attempts", "failed at", "error"),
        lambda row: (
            row["id"],
            row["queue"],
            row["partition"],
            row["consumerGroup"],
            row["retryCount"],
            row["failedAt"],
            row["errorMessage"],
        ),
    )
    typer.echo(f"{page['total']} in all", err=True)


@dead_letters.command("requeue")
def dlq_requeue(
    queue: Queue = None,
    group: Group = None,
    partition: Partition = None,
    id: Id = None,
    yes: Yes = False,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Deliver dead letters again to the groups they failed in.

    Example: `penstock queue dlq requeue orders --group billing`
    """
    confirm(f"Deliver {_matching(url, token, queue, group, partition, id)} again?", yes)
    _line(
        _run(
            url,
            token,
            lambda client: client.requeue(queue, consumer_group=group, partition=partition, id=id),
        )
    )


@dead_letters.command("purge")
def dlq_purge(
    queue: Queue = None,
    group: Group = None,
    partition: Partition = None,
    id: Id = None,
    yes: Yes = False,
    url: Url = LOCAL_URL,
    token: Token = "",
) -> None:
    """Delete dead letters for good.

    Example: `penstock queue dlq purge orders --group billing --yes`
    """
    confirm(f"Delete {_matching(url, token, queue, group, partition, id)} for good?", yes)
    _line(
        _run(
            url,
            token,
            lambda client: client.purge(queue, consumer_group=group, partition=partition, id=id),
        )
    )


def _matching(
    url: str,
    token: str,
    queue: str | None,
    group: str | None,
    partition: str | None,
    id: str | None,
) -> str:
    if id:
        return f"dead letter {id}"
    page = _run(
        url,
        token,
        lambda client: client.dead_letters(
            queue, consumer_group=group, partition=partition, limit=1
        ),
    )
    return f"{page['total']} dead letters of {queue or 'all queues'}"


# What they share


def _run(url: str, token: str, work: Callable[[Client], Awaitable[T]]) -> T:
    async def with_client() -> T:
        async with Client(url, token=token, patience=5.0) as client:
            return await work(client)

    with errors_explained():
        return asyncio.run(with_client())


def _input() -> Iterator[str]:
    return (line for line in map(str.strip, sys.stdin) if line)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _json(text: str) -> msgspec.Raw:
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        _usage(f"not JSON: {text[:60]} ({error}); use --text for plain text")
    return msgspec.Raw(text.encode())


def _batches(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    for line in lines:
        batch.append(line)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _line(value: Any) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def _show(
    rows: list[Any], as_json: bool, head: tuple[str, ...], cells: Callable[[Any], tuple[Any, ...]]
) -> None:
    """A table on a terminal, tab-separated lines in a pipe, or JSON."""
    if as_json:
        _line(rows)
    elif sys.stdout.isatty():
        table = Table(*head, box=None, header_style="bold")
        for row in rows:
            table.add_row(*map(_cell, cells(row)))
        Console(soft_wrap=True).print(table)
    else:
        for row in rows:
            print("\t".join(map(_cell, cells(row))))


def _cell(value: Any) -> str:
    return (
        "-"
        if value is None
        else f"{value:,}"
        if isinstance(value, int) and sys.stdout.isatty()
        else str(value)
    )


def _usage(text: str) -> None:
    typer.echo(f"penstock: {text}", err=True)
    raise typer.Exit(2)
