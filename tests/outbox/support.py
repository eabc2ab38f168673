"""What several tests of the outbox do."""

from typing import Any

from penstock.client.messages import Message as ClientMessage
from penstock.queues import Message, Queues


def leased(message: Message) -> ClientMessage:
    """A message of the engine as the client hands it out."""
    return ClientMessage(
        id=message.id,
        transaction_id=message.transaction_id,
        created_at=message.created_at,
        partition=message.partition,
        partition_id=message.partition_id,
        lease_id=message.lease_id,
        consumer_group=message.group,
    )


async def rows(queues: Queues, sql: str, *args: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in await queues.database.fetch(sql, *args)]
