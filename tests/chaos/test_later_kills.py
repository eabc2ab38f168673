"""Messages for later and schedules while brokers and PostgreSQL are killed over their due times: what
was accepted is stored once, and not before its time; every due time of a schedule has one message.
The ledger is the table of messages itself."""

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import asyncpg
import httpx

from tests.support.broker import BrokerProcess
from tests.support.wait import eventually

PRODUCERS, PARTITIONS = 4, 3
PUSH_EVERY_SECONDS = 0.05
POLL_SECONDS = 0.1
HOUR = timedelta(hours=1)
STORED = """SELECT m.transaction_id AS id, extract(epoch FROM m.created_at)::float8 AS at,
                   convert_from(m.headers, 'UTF8')::json ->> 'name' AS name
              FROM penstock.messages m JOIN penstock.queues q ON q.id = m.queue_id
             WHERE q.name = '{}'"""
CLOCKS_SECONDS = 0.005  # what two clocks of one machine may drift apart in an outage


@dataclass
class Ledger:
    """Producers that push for later, and what they were promised."""

    urls: list[str]
    not_before: dict[str, float] = field(default_factory=dict)  # accepted: the earliest moment
    statuses: set[str] = field(default_factory=set)
    stop: bool = False

    async def produce(self, number: int) -> None:
        chance = random.Random(number)
        async with httpx.AsyncClient(timeout=5) as client:
            turn = 0
            while not self.stop:
                turn += 1
                delays = {f"{number}-{turn}-{n}": chance.uniform(0.05, 2.0) for n in range(5)}
                items = [
                    {
                        "queue": "later",
                        "partition": f"p{chance.randrange(PARTITIONS)}",
                        "payload": name,
                        "transactionId": name,
                        "headers": {"name": name},
                        "delay": delay,
                    }
                    for name, delay in delays.items()
                ]
                began = time.time()
                await self.push(client, items, chance)
                self.not_before |= {name: began + delay for name, delay in delays.items()}
                await asyncio.sleep(PUSH_EVERY_SECONDS)

    async def push(self, client: httpx.AsyncClient, items: list[object], chance: random.Random):
        """Until some broker has accepted them."""
        while True:
            try:
                url = f"{chance.choice(self.urls)}/api/v1/push"
                answer = await client.post(url, json={"items": items})
            except httpx.HTTPError:
                await asyncio.sleep(0.05)
                continue
            if answer.status_code == 201:
                self.statuses |= {one["status"] for one in answer.json()}
                return
            assert answer.status_code == 503, answer.text
            await asyncio.sleep(0.05)


async def test_none_is_lost_none_comes_twice_and_none_early(scratch, own_postgres, soak):
    brokers = [
        BrokerProcess(scratch / name, database_url=own_postgres.url) for name in ("one", "two")
    ]
    ledger = Ledger([])

    async def rows(sql: str) -> list[asyncpg.Record]:
        connection = await asyncpg.connect(own_postgres.url)
        try:
            return await connection.fetch(sql)
        finally:
            await connection.close()

    async def chaos() -> None:
        for turn in range(12 if soak else 1):
            os.kill(own_postgres.pid(), signal.SIGKILL)
            await eventually(lambda: "buffered" in ledger.statuses, timeout=60)
            await asyncio.to_thread(brokers[turn % 2].kill)
            await asyncio.gather(
                asyncio.to_thread(own_postgres.start), asyncio.to_thread(brokers[turn % 2].start)
            )
            accepted = len(ledger.not_before)
            await eventually(lambda n=accepted: len(ledger.not_before) > n + 20, timeout=60)

    async def arrived() -> bool:
        await asyncio.sleep(POLL_SECONDS)
        stored = {row["id"] for row in await rows(STORED.format("later"))}
        return ledger.not_before.keys() <= stored

    async def ticks() -> list[datetime]:
        """The due times whose messages are stored, each with one; none came early."""
        result = await rows(STORED.format("ticks"))
        stored = {
            datetime.fromisoformat(row["id"].removeprefix("schedule:ticker:")): row["at"]
            for row in result
        }
        assert len(stored) == len(result)
        assert all(at >= due.timestamp() for due, at in stored.items())
        return sorted(stored)

    with brokers[0], brokers[1]:
        ledger.urls += [broker.url for broker in brokers]
        ticker = f"{ledger.urls[0]}/api/v1/schedules/ticker"
        every_second = {"cron": "* * * * * *", "queue": "ticks", "catchUp": "all"}
        async with httpx.AsyncClient(timeout=30) as client:
            (await client.put(ticker, json=every_second)).raise_for_status()
        producers = [asyncio.create_task(ledger.produce(number)) for number in range(PRODUCERS)]
        await eventually(lambda: len(ledger.not_before) > 20, timeout=60)
        await chaos()
        ledger.stop = True
        await asyncio.gather(*producers)
        await eventually(arrived, timeout=60)
        stored = await rows(STORED.format("later"))
        assert len(stored) == len(ledger.not_before)
        for row in stored:
            assert row["at"] > ledger.not_before[row["id"]] - CLOCKS_SECONDS
            assert row["name"] == row["id"]
        restarted = datetime.now(UTC)

        async def caught_up() -> bool:
            return max(await ticks(), default=restarted - HOUR) > restarted

        await eventually(caught_up, timeout=60)
        due = await ticks()
        assert due == [due[0] + timedelta(seconds=n) for n in range(len(due))]
        assert await rows("SELECT 1 FROM penstock.scheduled_messages") == []
        assert {"scheduled", "buffered"} <= ledger.statuses
