"""`penstock queue messages`, `message` and `cancel`: stored messages, without a lease on them."""

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.cli import BrokerApi, WatchApi, Yes, confirm, usage
from penstock.cli.queue import Name, commands
from penstock.cli.tables import Column, View, print_json, table, when

MESSAGES, SCHEDULED = "/api/v1/messages", "/api/v1/scheduled"
TransactionId = Annotated[str, Parameter(help="The message's transactionId.")]


@commands.command
def messages(
    queue: Name,
    /,
    *,
    partition: Annotated[str | None, Parameter(alias="-p")] = None,
    status: str | None = None,
    since: Annotated[str | None, Parameter(name="--from")] = None,
    until: Annotated[str | None, Parameter(name="--to")] = None,
    scheduled: bool = False,
    limit: Annotated[int, Parameter(alias="-n", validator=Number(gte=1, lte=1000))] = 50,
    api: WatchApi = WatchApi(),
) -> View:
    """List stored messages, newest first. This takes no lease and counts as no attempt.

    Examples:

    `penstock queue messages orders --partition c-1 --status waiting`

    `penstock queue messages reminders --scheduled`

    :param partition: Only messages of this partition.
    :param status: Only messages in this state: waiting, leased, completed or dead_letter.
    :param since: Only messages pushed at or after this time, such as 2026-01-31T12:00Z.
    :param until: Only messages pushed before this time.
    :param scheduled: List delayed messages instead, next due first.
    :param limit: Most messages to show.
    """
    query = {"queue": queue, "partition": partition, "limit": limit}
    if scheduled:
        return table(
            api.get(SCHEDULED, **query)["messages"],
            Column("due", "deliverAt", when),
            Column("partition"),
            Column("transactionId"),
            Column("pushed", "pushedAt", when, optional=True),
            empty="no delayed messages",
        )
    page = api.get(MESSAGES, **query, status=status, **{"from": since, "to": until})
    return table(
        page["messages"],
        Column("pushed", "createdAt", when),
        Column("partition"),
        Column("state"),
        Column("transactionId"),
        Column("producer", optional=True),
        Column("partitionId", optional=True),
        empty="no messages that match",
        note="there are more: --limit, --from, --to" if page["next"] else "",
    )


@commands.command
def message(
    partition: str,
    transaction: TransactionId,
    /,
    *,
    delete: bool = False,
    retry: bool = False,
    yes: Yes = False,
    api: BrokerApi = BrokerApi(),
) -> None:
    """Print a stored message as JSON, with its payload and its state in each group; or delete it,
    or deliver it again.

    Examples:

    `penstock queue message 20ff6f94-0000-8000-8008-000000000000 order-7 | jq .payload`

    `penstock queue message 20ff6f94-0000-8000-8008-000000000000 order-7 --retry`

    :param partition: The message's partitionId, as shown by `penstock queue messages`.
    :param delete: Permanently delete the message, for all groups.
    :param retry: Deliver a message again that was completed or became a dead letter.
    """
    if delete and retry:
        raise usage("--delete and --retry exclude each other")
    if delete:
        confirm(f"Delete message {transaction} for good?", yes)
        print_json(api.delete(MESSAGES, partition, transaction))
    elif retry:
        print_json(api.post(MESSAGES, partition, transaction, "retry"))
    else:
        print_json(api.get(MESSAGES, partition, transaction))


@commands.command
def cancel(
    queue: Name, partition: str, transaction: TransactionId, /, *, api: BrokerApi = BrokerApi()
) -> None:
    """Cancel a delayed message before it is due.

    Example: `penstock queue cancel orders Default order-9`

    :param partition: The message's partition.
    """
    print_json(api.delete(SCHEDULED, queue, partition, transaction))
