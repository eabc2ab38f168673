"""A web application that answers at once and leaves the work to a worker.

Both are in one program here. In a program of its own `client.run()` is the worker.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from fastapi import FastAPI

from penstock import Client, backoff

client = Client.from_env()
mails: list[str] = []  # instead of a mail server


class Order(msgspec.Struct):
    id: int
    customer: str


@client.consumer("web-orders@mail", concurrency=4, retry=backoff(max_attempts=5))
async def send_mail(order: Order) -> None:
    mails.append(f"to {order.customer}: we have your order {order.id}")


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with client:
        worker = asyncio.create_task(client.run())
        yield
        client.stop()
        await worker  # what is being handled finishes


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{number}", status_code=202)
async def order(number: int, customer: str = "anna") -> dict[str, str]:
    # the same transaction id twice is stored once: a user may click again
    pushed = await client.push(
        "web-orders",
        Order(number, customer),
        partition=customer,
        transaction_id=f"order-{number}",
    )
    return {"status": pushed.status}


@app.get("/mails")
async def sent() -> list[str]:
    return mails
