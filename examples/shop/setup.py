"""Prepare the database and the broker: `python -m shop.setup`. It may run again and again."""

import asyncio

from penstock import Client
from shop.models import ORDERS, REPORTS, Table, new_engine

WEEK_SECONDS = 7 * 24 * 3600


async def main() -> None:
    engine = new_engine()
    async with engine.begin() as connection:
        await connection.run_sync(Table.metadata.create_all)
    await engine.dispose()
    async with Client.from_env() as client:
        # Completed messages stay for ever unless you say otherwise.
        await client.configure(
            ORDERS,
            ordering="none",
            retention_enabled=True,
            completed_retention_seconds=WEEK_SECONDS,
        )
        await client.schedules.create("shop-report", cron="0 3 * * *", queue=REPORTS)


if __name__ == "__main__":
    asyncio.run(main())
