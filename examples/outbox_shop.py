"""A shop whose orders and messages are one commit, and a worker whose ack is part of its own write.

The shop's tables are in the database of the broker's queues (SHOP_DATABASE). Whatever dies in
between: there is no order without its message, no message without its order, and no second invoice.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
from fastapi import FastAPI, HTTPException

from penstock import Client, Message, outbox

TABLES = """
CREATE TABLE IF NOT EXISTS shop_orders (id int PRIMARY KEY, total int NOT NULL CHECK (total > 0));
CREATE TABLE IF NOT EXISTS shop_invoices (order_id int NOT NULL, total int NOT NULL);
"""
client = Client.from_env()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with asyncpg.create_pool(os.environ["SHOP_DATABASE"], min_size=1) as pool, client:
        await pool.execute(TABLES)
        app.state.pool = pool

        @client.consumer("shop-orders@invoices", concurrency=2)
        async def invoice(message: Message) -> None:
            async with pool.acquire() as connection, connection.transaction():
                await connection.execute(
                    "INSERT INTO shop_invoices SELECT id, total FROM shop_orders WHERE id = $1",
                    message.data["id"],
                )
                await outbox.ack(connection, message)

        worker = asyncio.create_task(client.run())
        yield
        client.stop()
        await worker


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{number}", status_code=201)
async def order(number: int, total: int) -> dict[str, int]:
    try:
        async with app.state.pool.acquire() as connection, connection.transaction():
            await outbox.push(connection, "shop-orders", {"id": number}, partition=str(number))
            # fails for a total of 0, or an order that is there: then there is no message either
            await connection.execute("INSERT INTO shop_orders VALUES ($1, $2)", number, total)
    except asyncpg.IntegrityConstraintViolationError as error:
        raise HTTPException(409, str(error)) from None
    return {"order": number}


@app.get("/invoices")
async def invoices() -> list[tuple[int, int]]:
    rows = await app.state.pool.fetch("SELECT * FROM shop_invoices ORDER BY order_id")
    return [tuple(row) for row in rows]
