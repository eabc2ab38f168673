"""A worker as an application has it: takes work over HTTP, and does it and acknowledges it in one
commit. Runs until it is killed.
"""

import asyncio

import asyncpg

from penstock import Client, outbox
from penstock.outbox import is_lease_lost


async def main(broker: str, database: str, queue: str) -> None:
    connection = await asyncpg.connect(database)
    async with Client(broker, retry_for=300) as client:
        while True:
            for message in await client.pop(f"{queue}@workers", batch=10, wait=5):
                try:
                    async with connection.transaction():
                        await connection.execute(
                            "INSERT INTO effects VALUES ($1, $2)", queue, str(message.data)
                        )
                        await outbox.ack(connection, message)
                except (outbox.LeaseLost, asyncpg.PostgresError) as error:
                    if not is_lease_lost(error):
                        raise


def run(broker: str, database: str, queue: str) -> None:
    asyncio.run(main(broker, database, queue))
