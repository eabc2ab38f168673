"""A report every night at three, in Rome: the schedule, and the worker that makes the report.

Starting it again changes nothing: a schedule is created once and keeps what is due. With --now it
makes one report at once and ends.
"""

import asyncio
import sys

from penstock import Client, Message


async def main() -> None:
    async with Client.from_env() as client:
        schedule = await client.schedules.create(
            "nightly-report",
            cron="0 3 * * *",
            timezone="Europe/Rome",
            queue="reports",
            payload={"kind": "daily"},
            catch_up="one",  # broker down at three: one report when it is back
        )
        print("next reports:", *schedule.next_runs[:2])

        @client.consumer("reports@report-maker")
        async def make_report(message: Message) -> None:
            print(f"made the {message.data['kind']} report of {message.transaction_id}")
            if "--now" in sys.argv:
                client.stop()

        if "--now" in sys.argv:
            await client.schedules.run("nightly-report")
        await client.run()


if __name__ == "__main__":
    asyncio.run(main())
