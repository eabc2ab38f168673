"""`penstock queue messages` and `message`: stored messages, without taking them from anybody."""

from typing import Annotated

from penstock.cli import Api, Yes, argument, confirm, option
from penstock.cli.queue import Name, commands
from penstock.cli.tables import Column, View, print_json, table, when

MESSAGES, SCHEDULED = "/api/v1/messages", "/api/v1/scheduled"
Partition = Annotated[str | None, option("Only messages of this partition.", "-p")]
Limit = Annotated[int, option("Most messages to show.", "-n", min=1, max=1000)]
PartitionId = Annotated[
    str, argument("The message's partitionId, as shown by `penstock queue messages`.")
]
TransactionId = Annotated[str, argument("The message's transactionId.")]


@commands.command(watch=True)
def messages(
    api: Api,
    queue: Name,
    partition: Partition = None,
    status: Annotated[
        str | None,
        option("Only messages in this state: pending, processing, completed or dead_letter."),
    ] = None,
    since: Annotated[
        str | None,
        option("Only messages pushed at or after this time, such as 2026-01-31T12:00Z.", "--from"),
    ] = None,
    until: Annotated[str | None, option("Only messages pushed before this time.", "--to")] = None,
    limit: Limit = 50,
) -> View:
    """List stored messages, newest first. This takes no lease and counts as no attempt.

    Example: `penstock queue messages orders --partition c-1 --status pending`
    """
    query = {"queue": queue, "partition": partition, "status": status, "limit": limit}
    page = api.get(MESSAGES, **query, **{"from": since, "to": until})
    return table(
        page["messages"],
        Column("pushed", "createdAt", when),
        Column("partition"),
        Column("status"),
        Column("transactionId"),
        Column("producer", "producerSub", optional=True),
        Column("partitionId", optional=True),
        empty="no messages that match",
        note="there are more: --limit, --from, --to" if page["next"] else "",
    )


@commands.command()
def message(api: Api, partition: PartitionId, transaction: TransactionId) -> None:
    """Print a stored message as JSON, with its payload and its state in each group.

    Example: `penstock queue message 20ff6f94-0000-8000-8008-000000000000 order-7 | jq .payload`
    """
    print_json(api.get(MESSAGES, partition, transaction))


@commands.command("delete-message")
def delete_message(
    api: Api, partition: PartitionId, transaction: TransactionId, yes: Yes = False
) -> None:
    """Permanently delete one message, for all groups.

    Example: `penstock queue delete-message 20ff6f94-0000-8000-8008-000000000000 order-7`
    """
    confirm(f"Delete message {transaction} for good?", yes)
    print_json(api.delete(MESSAGES, partition, transaction))


@commands.command("retry-message")
def retry_message(api: Api, partition: PartitionId, transaction: TransactionId) -> None:
    """Deliver a message again that was completed or became a dead letter.

    Example: `penstock queue retry-message 20ff6f94-0000-8000-8008-000000000000 order-7`
    """
    print_json(api.post(MESSAGES, partition, transaction, "retry"))


@commands.command(watch=True)
def scheduled(api: Api, queue: Name, partition: Partition = None, limit: Limit = 50) -> View:
    """List delayed messages, next due first.

    Example: `penstock queue scheduled orders`
    """
    return table(
        api.get(SCHEDULED, queue=queue, partition=partition, limit=limit)["messages"],
        Column("due", "deliverAt", when),
        Column("partition"),
        Column("transactionId"),
        Column("pushed", "pushedAt", when, optional=True),
        empty="no messages for later",
    )


@commands.command()
def cancel(
    api: Api,
    queue: Name,
    partition: Annotated[str, argument("The message's partition.")],
    transaction: TransactionId,
) -> None:
    """Cancel a delayed message before it is due.

    Example: `penstock queue cancel orders Default order-9`
    """
    print_json(api.delete(SCHEDULED, queue, partition, transaction))
