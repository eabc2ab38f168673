"""Queues while processes die: whatever was answered `queued` is delivered, and several brokers are
one.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import pytest

from penstock import Client
from penstock.errors import AckRefused, PenstockError
from tests.support.broker import BrokerProcess
from tests.support.form import SOAK
from tests.support.wait import Stopwatch, eventually, until

pytestmark = pytest.mark.xdist_group("queue-kills")

PRODUCERS, CONSUMERS = 8, 4
# longer than the chaos: who returns only while the broker is dead, again and again, does not give
# up
PATIENCE = 300
SECONDS = 60.0 if SOAK else 0.0  # of traffic, at least


@dataclass
class Traffic:
    """Producers and consumers on one partition, and what they were told."""

    urls: list[str]
    queue: str = "orders"
    queued: set[str] = field(default_factory=set)
    delivered: Counter[str] = field(default_factory=Counter)
    stop: bool = False
    complete: bool = (
        False  # no producer has a push under way any more, so `queued` is all there will be
    )

    async def produce(self, number: int) -> None:
        async with Client(self.urls, timeout=5, retry_for=PATIENCE) as client:
            turn = 0
            while not self.stop:
                names = [f"{number}-{turn}-{item}" for item in range(5)]
                results = await client.push_many(self.queue, names)
                assert {result.status for result in results} <= {"queued", "buffered"}
                self.queued.update(names)
                turn += 1

    async def consume(self) -> None:
        async with Client(self.urls, timeout=5, retry_for=PATIENCE) as client:
            while not (self.complete and self.queued <= self.delivered.keys()):
                try:
                    messages = await client.pop(self.queue, batch=50, wait=0.5)
                    self.delivered.update(message.data for message in messages)
                    if messages:
                        await client.ack(messages)
                except AckRefused:
                    # the lease was lost with the broker or the database: the messages come again
                    pass
                except PenstockError:
                    await asyncio.sleep(0.1)

    async def advance(self) -> None:
        """Wait until so many more messages come through."""
        enough = len(self.delivered) + 60
        await eventually(lambda: len(self.delivered) > enough)

    async def run(self, chaos) -> None:
        producers = [asyncio.create_task(self.produce(number)) for number in range(PRODUCERS)]
        consumers = [asyncio.create_task(self.consume()) for _ in range(CONSUMERS)]
        ends = time.monotonic() + SECONDS
        await self.advance()
        await chaos()
        await eventually(lambda: time.monotonic() > ends, SECONDS + 1)
        self.stop = True
        await asyncio.gather(*producers)
        self.complete = True
        async with asyncio.timeout(60):
            await asyncio.gather(*consumers)
        assert self.queued <= self.delivered.keys()
        assert len(self.queued) > 100


async def short_leases(url: str) -> None:
    async with Client(url) as client:
        await client.configure("orders", lease_time=1, retry_limit=1000, retry_delay=0)


async def test_every_queued_message_is_delivered_though_the_broker_is_killed(
    scratch, database_url, soak
):
    with BrokerProcess(scratch / "one", database_url=database_url) as broker:
        traffic = Traffic([broker.url])

        async def chaos() -> None:
            for _ in range(10 if soak else 2):
                await asyncio.to_thread(broker.kill)
                await asyncio.to_thread(broker.start)
                await traffic.advance()

        await short_leases(broker.url)
        await traffic.run(chaos)


async def test_every_queued_message_is_delivered_though_postgresql_is_killed(
    scratch, own_postgres, soak
):
    with BrokerProcess(scratch / "one", database_url=own_postgres.url) as broker:
        traffic = Traffic([broker.url])

        async def chaos() -> None:
            for _ in range(8 if soak else 1):
                os.kill(own_postgres.pid(), signal.SIGKILL)
                await asyncio.to_thread(until, lambda: httpx.get(f"{broker.url}/health").is_error)
                await asyncio.to_thread(own_postgres.start)
                await traffic.advance()

        await short_leases(broker.url)
        await traffic.run(chaos)


async def test_two_brokers_on_one_database_are_one(scratch, database_url):
    with (
        BrokerProcess(scratch / "one", database_url=database_url) as one,
        BrokerProcess(scratch / "two", database_url=database_url) as two,
    ):
        async with Client(one.url) as first, Client(two.url) as second:
            await first.push("q", 0)
            (message,) = await second.pop("q")
            assert await first.pop("q") == []  # leased through the other broker
            await first.ack(message)
            slow = []
            for turn in range(10):
                waiting = asyncio.create_task(second.pop("q", wait=20))
                await asyncio.sleep(0.05)
                watch = Stopwatch()
                await first.push("q", turn)
                (message,) = await waiting
                slow.append(watch.seconds)
                await first.ack(message)
            assert sorted(slow)[5] < 0.5  # woken by the push, not by the next look a second later

        traffic = Traffic([one.url, two.url])

        async def chaos() -> None:
            await asyncio.to_thread(two.kill)
            await traffic.advance()

        await short_leases(one.url)
        await traffic.run(chaos)
