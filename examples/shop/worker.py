"""The worker: `penstock worker shop.worker:client --processes 2`."""

import json
import logging
from collections.abc import AsyncIterator

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from penstock import Client, DeadLetter, Message, backoff
from shop.models import EVENTS, ORDERS, REPORTS, Order, OrderPlaced, new_engine

log = logging.getLogger("shop")
client = Client.from_env()
engine: AsyncEngine


class PaymentFailed(Exception):
    """The payment provider did not answer, or not well."""


@client.lifespan
async def database() -> AsyncIterator[None]:
    """Open what the handlers need before they start, and close it after they have ended."""
    global engine
    engine = new_engine()
    yield
    await engine.dispose()


async def charge(order: OrderPlaced) -> str:
    """Charge the customer. A real provider takes the order's id as its idempotency key."""
    if order.total < 0:
        raise DeadLetter(f"order {order.id} has a negative total")  # no attempt can mend it
    return f"receipt-{order.id}"


@client.consumer(
    f"{ORDERS}@billing",
    concurrency=8,
    timeout=30,
    retry=backoff(5, retry_on=(PaymentFailed, TimeoutError, OSError)),
)
async def bill(order: OrderPlaced, message: Message) -> None:
    receipt = await charge(order)
    async with AsyncSession(engine) as session, session.begin():
        paid = update(Order).where(Order.id == order.id, Order.state == "new")
        await session.execute(paid.values(state="paid"))  # a second delivery changes nothing
    event = {"event": "paid", "order": order.id, "receipt": receipt, "attempt": message.attempt}
    await client.topic(EVENTS).produce(json.dumps(event).encode())


@client.consumer(REPORTS)
async def report(_: Message) -> None:
    """The schedule pushes a message each night; see setup.py."""
    async with AsyncSession(engine) as session:
        counts = await session.execute(select(Order.state, func.count()).group_by(Order.state))
        event = {"event": "report", "orders": dict(row.tuple() for row in counts)}
    log.info("%s", event)
    await client.topic(EVENTS).produce(json.dumps(event).encode())
