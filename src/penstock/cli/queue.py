"""`penstock queue`: push and pop messages, and manage queues, from a shell.

Messages are written to standard output, and read from standard input, as one JSON value per line,
so commands compose. Other results are shown as in `penstock.cli.tables`. Exit code 1 means that the
broker refused or could not be reached, 2 wrong usage.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from penstock.cli import (
    AnyText,
    BrokerApi,
    LimitOrAll,
    NotNegative,
    Positive,
    WatchApi,
    Yes,
    command_group,
    completer,
    confirm,
    say,
    usage,
)
from penstock.cli.tables import (
    Column,
    Facts,
    TableBlock,
    TextLine,
    View,
    count,
    duration,
    print_json,
    print_line,
    rate,
    table,
    when,
)
from penstock.errors import InvalidRequest, NotFound
from penstock.protocol.names import QUEUE_MODE
from penstock.protocol.times import time_field

if TYPE_CHECKING:
    from penstock.client import SyncClient

QUEUES, GROUPS = "/api/v1/queues", "/api/v1/consumer-groups"
complete_queue = completer(QUEUES, "queues", filtered=True)
Name = Annotated[str, Parameter(help="Name of the queue.", completer=complete_queue)]

commands = command_group("queue")


# Messages


@commands.command
def push(
    queue: Annotated[str, Parameter(completer=complete_queue)],
    /,
    *payloads: str,
    partition: Annotated[str | None, Parameter(alias="-p")] = None,
    transaction_id: Annotated[str | None, Parameter(alias="-t")] = None,
    header: Annotated[list[str] | None, Parameter(alias="-H")] = None,
    delay: Annotated[float | None, Parameter(validator=NotNegative)] = None,
    at: str | None = None,
    text: bool = False,
    batch: Annotated[int, Parameter(validator=Positive)] = 500,
    quiet: Annotated[bool, Parameter(alias="-q")] = False,
    api: BrokerApi = BrokerApi(),
) -> None:
    """Push messages and print the result of each, one JSON object per line.

    Examples:

    `penstock queue push orders '{"id": 7}' --partition c-1`

    `cat orders.jsonl | penstock queue push orders`

    `penstock queue push reminders '{"cart": 7}' --delay 3600 --header tenant=a`

    :param queue: Queue, or queue/partition.
    :param payloads: Messages as JSON values; default: one per line of standard input.
    :param partition: Partition to push to.
    :param transaction_id: Id (transactionId) of a single message; a repeated push is not stored
        twice.
    :param header: Header as NAME=VALUE; may be repeated.
    :param delay: Delay in seconds before the messages can be delivered.
    :param at: Time from which the messages can be delivered, such as 2026-01-31T12:00:00Z.
    :param text: Read payloads as plain text instead of JSON.
    :param batch: Lines of standard input per request.
    :param quiet: Print nothing for stored messages.
    """
    if transaction_id and len(payloads) != 1:
        raise usage("--transaction-id goes with exactly one payload")
    envelope: dict[str, Any] = {  # common to all messages
        "partition": partition,
        "headers": dict(map(_header, header or [])),
        "delay": delay,
        "deliver_at": None if at is None else _moment(at),
    }

    empty = True
    with _client(api) as client:
        for lines in _batches(payloads if payloads else _input(), batch):
            empty = False
            values = [line if text else _json(line) for line in lines]
            if transaction_id:
                results = [client.push(queue, values[0], transaction_id=transaction_id, **envelope)]
            else:
                results = client.push_many(queue, values, **envelope)
            if not quiet:
                for one in results:
                    about = {"transactionId": one.transaction_id, "id": one.message_id}
                    print_line({"status": one.status} | about)
    if empty and not quiet:
        say(f"penstock: no messages were pushed to {queue}: standard input is empty")


@commands.command
def pop(
    address: Annotated[str, Parameter(completer=complete_queue)],
    /,
    *,
    batch: Annotated[int, Parameter(alias="-n", validator=Positive)] = 1,
    wait: float = 0.0,
    follow: Annotated[bool, Parameter(alias="-f")] = False,
    ack: bool = False,
    data: bool = False,
    api: BrokerApi = BrokerApi(),
) -> None:
    """Pop messages and print them, one JSON object per line.

    Without `--ack`, they stay leased until `penstock queue ack` acknowledges them or the lease
    expires.

    Examples:

    `penstock queue pop orders@billing -n 10 --ack --data`

    `penstock queue pop orders -n 10 | tee work | ./handle && penstock queue ack < work`

    :param address: queue, queue/partition or queue@group.
    :param batch: Most messages per pop.
    :param wait: Seconds to wait if there are no messages.
    :param follow: Keep popping until Ctrl-C; implies --ack.
    :param ack: Acknowledge the printed messages.
    :param data: Print only the payloads.
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


@commands.command(name="ack")
def ack_command(
    *,
    status: Annotated[
        Literal["completed", "failed", "retry", "dlq"], Parameter(alias="-s")
    ] = "completed",
    error: Annotated[str | None, Parameter(alias="-e", allow_leading_hyphen=True)] = None,
    api: BrokerApi = BrokerApi(),
) -> None:
    """Acknowledge messages read from standard input, as printed by `penstock queue pop`.

    Example: `penstock queue ack --status failed --error "no stock" < work.jsonl`

    :param status: Outcome of the messages.
    :param error: Error message, for messages that failed.
    """
    from penstock.client.sync import SyncMessage
    from penstock.errors import AckRefused

    messages = []
    for number, line in enumerate(_input(), 1):
        try:
            messages.append(msgspec.json.decode(line, type=SyncMessage))
        except msgspec.DecodeError as problem:
            raise usage(
                f"line {number} is not a message as `penstock queue pop` prints it: {problem}"
            ) from None
    with _client(api) as client:
        try:
            results = client.ack(messages, status, error=error) if messages else []
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
    Column("completed/s", "completedRate", rate),
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


@commands.command(name="list")
def list_command(
    filter: str = "",
    /,
    *,
    sort: AnyText = "name",
    limit: LimitOrAll = 0,
    api: WatchApi = WatchApi(),
) -> View:
    """List the queues with their counts and rates.

    Examples:

    `penstock queue list --sort -waiting -n 20 --watch`

    `penstock queue list --json | jq -r '.[] | select(.waiting > 1000) | .name'`

    :param filter: Only queues whose name contains this text.
    :param sort: Sort by a field of --json, such as waiting; -waiting sorts the largest first.
    :param limit: Most queues to show; 0 = all.
    """
    return table(
        api.rows(QUEUES, "queues", limit, filter=filter, sort=sort),
        Column("queue", "name"),
        *FIGURES,
        empty="no queues; the first push makes one: penstock queue push orders '{\"id\": 1}'",
    )


def _number(groups: Any) -> int:
    return groups if isinstance(groups, int) else len(groups)


@commands.command
def describe(queue: Name, /, *, api: WatchApi = WatchApi()) -> View:
    """Show the counts, options, groups and partitions of a queue.

    Example: `penstock queue describe orders`
    """
    about = api.get(QUEUES, queue)
    slowest = max(about["groups"], key=lambda one: one["waiting"], default={"name": ""})
    partitions = api.get(QUEUES, queue, "partitions", group=slowest["name"])
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
            TableBlock(
                (Column("group", lambda row: group_title(row["name"])), *GROUP_FIGURES),
                about["groups"],
                f"no groups; a pop makes one: penstock queue pop {queue}@group",
            ),
            TextLine(f"partitions as {group_title(slowest['name'])} sees them:", "dim"),
            TableBlock(PARTITIONS, partitions["partitions"], "no partitions"),
            *_more(partitions),
        ],
    )


def group_title(group: str) -> str:
    return "(queue mode)" if group in ("", QUEUE_MODE) else group


def _more(page: dict[str, Any]) -> Iterator[TextLine]:
    if page["total"] > len(page["partitions"]):
        yield TextLine(f"{page['total']:,} partitions in all, those with the largest lag are shown")


@commands.command
def configure(
    queue: Name,
    /,
    *options: str,
    namespace: str = "",
    task: str = "",
    reset: bool = False,
    api: BrokerApi = BrokerApi(),
) -> None:
    """Create a queue or change its options. Options that you leave out stay as they are.

    Example: `penstock queue configure orders leaseTime=30 retryLimit=5 ordering=none`

    :param options: Options as NAME=VALUE, such as leaseTime=30.
    :param namespace: Namespace of a new queue.
    :param task: Task of a new queue.
    :param reset: Return the options that you leave out to their defaults.
    """
    values = _options(options)
    if not reset:
        try:
            print_json(api.ask("PATCH", QUEUES, queue, "options", body=values))
            return
        except NotFound:
            pass
    body = {"queue": queue, "namespace": namespace, "task": task, "options": values}
    print_json(api.post("/api/v1/configure", body=body))


def _options(words: Iterable[str]) -> dict[str, Any]:
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


@commands.command
def delete(
    queue: Name, /, *, yes: Yes = False, keep: bool = False, api: BrokerApi = BrokerApi()
) -> None:
    """Delete a queue with its messages, groups and dead letters, or one of its consumer groups
    (QUEUE@GROUP): its cursor, leases and retries.

    Examples:

    `penstock queue delete scratch --yes`

    `penstock queue delete orders@billing`

    :param keep: Delete only the messages and keep the queue.
    """
    name, _, group = queue.partition("@")
    if group:
        confirm(f"Delete group {group} of queue {name}? It would begin as a new group does.", yes)
        print_json(api.delete(GROUPS, group, "queues", name))
        return
    confirm(f"Delete {'the messages of ' if keep else ''}queue {queue} for good?", yes)
    if keep:
        print_json(api.delete(QUEUES, queue, "clear"))
    elif not api.delete(QUEUES, queue)["existed"]:
        say(f"there was no queue {queue}")


# Helpers


def _client(api: BrokerApi) -> "SyncClient":
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
        raise usage(f"--header must be name=value, not {text}")
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
import penstock.cli.queue_messages  # noqa: E402, F401  # they add their commands to the group
