"""The web application: it answers at once and leaves the work to the worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from penstock import Client, outbox
from shop.models import EVENTS, ORDERS, Order, OrderPlaced, new_engine

client = Client.from_env()
engine = new_engine()


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with client:
        yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=202)
async def place(order: OrderPlaced) -> dict[str, str]:
    try:
        async with AsyncSession(engine) as session, session.begin():
            session.add(Order(**order.model_dump()))
            # In the same transaction: no order without its message, no message without its order.
            await outbox.push(session, ORDERS, order)
    except IntegrityError:
        raise HTTPException(409, f"there is an order {order.id}") from None
    return {"status": "accepted"}


@app.get("/orders/{number}")
async def show(number: int) -> dict[str, str]:
    async with AsyncSession(engine) as session:
        order = await session.get(Order, number)
        if order is None:
            raise HTTPException(404, f"there is no order {number}")
        return {"state": order.state}


@app.get("/events")
async def events(limit: int | None = None) -> StreamingResponse:
    """What happens in the shop, live: the browser's `EventSource` reads it."""

    async def lines() -> AsyncIterator[str]:
        seen = 0
        try:
            async for record in client.topic(EVENTS).tail("earliest"):
                yield f"id: {record.offset}\ndata: {record.payload.decode()}\n\n"
                seen += 1
                if seen == limit:
                    return
        except asyncio.CancelledError:  # the browser has left
            return

    return StreamingResponse(lines(), media_type="text/event-stream")
