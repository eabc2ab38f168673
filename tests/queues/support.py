"""A queue engine on a fresh database, and short forms of what every test does with it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.config import schema
from penstock.database import Database
from penstock.metrics import Metrics
from penstock.queues import Ack, AckOutcome, Delivered, Item, PopOutcome, PopRequest, Queues
from penstock.queues.schema import SCHEMA
from tests.support.wait import DATABASE_TIMEOUT


@asynccontextmanager
async def running(
    url: str, database: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Queues]:
    """An engine that runs for the length of the block; its database is `queues.database`."""
    metrics = Metrics()
    connected = Database(
        schema.DatabaseSettings(
            url=url, **{"acquire_timeout": DATABASE_TIMEOUT, **(database or {})}
        ),
        Path("/nonexistent"),
        metrics,
        SCHEMA,
    )
    await connected.start()
    queues = Queues(connected, schema.QueuesSettings(**settings), metrics)
    await queues.start()
    try:
        yield queues
    finally:
        await queues.stop()
        await connected.stop()


async def push(queues: Queues, queue: str, *payloads: Any, partition: str = "Default") -> list[str]:
    """Push JSON values; their transaction ids."""
    answers = await queues.push(
        [Item(queue, json.dumps(payload).encode(), partition) for payload in payloads]
    )
    assert [answer.status for answer in answers] == ["queued"] * len(payloads)
    return [answer.transaction_id for answer in answers]


async def pop(queues: Queues, queue: str, batch: int = 100, **request: Any) -> PopOutcome:
    return await queues.pop(PopRequest(queue=queue, batch=batch, **request))


def values(popped: PopOutcome) -> list[Any]:
    return [json.loads(message.payload) for message in popped.messages]


def acks_of(popped: PopOutcome, status: str = "completed") -> list[Ack]:
    return [Ack(m.transaction_id, m.partition_id, m.lease_id, status) for m in popped.messages]


async def answer(
    queues: Queues,
    messages: list[Delivered],
    status: str = "completed",
    error: str | None = None,
    lease: bool = True,
) -> list[AckOutcome]:
    return await queues.ack(
        [
            Ack(
                m.transaction_id,
                m.partition_id,
                m.lease_id if lease else None,
                status,
                error,
                m.group,
            )
            for m in messages
        ]
    )


async def complete(queues: Queues, popped: PopOutcome) -> None:
    for acked in await answer(queues, popped.messages):
        assert acked.success, acked


async def expire_leases(queues: Queues) -> None:
    """Let every lease run out, by the only clock that counts."""
    await queues.database.fetch("UPDATE leases SET expires_at = expires_at - interval '1 hour'")
    await queues.database.fetch(
        """UPDATE cursors SET next_expiry = next_expiry - interval '1 hour', version = version + 1,
             due_at = least(due_at, clock_timestamp())
            WHERE next_expiry IS NOT NULL"""
    )


async def skip_delays(queues: Queues) -> None:
    """Let every retry delay pass."""
    await queues.database.fetch("UPDATE attempts SET retry_at = retry_at - interval '1 hour'")
    await queues.database.fetch(
        """UPDATE cursors SET due_at = clock_timestamp(), version = version + 1
            WHERE due_at > clock_timestamp() AND next_expiry IS NULL"""
    )
