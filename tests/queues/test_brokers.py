"""Many producers and consumers, several brokers, a database that is interrupted: nothing is lost,
nothing doubled.
"""

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import pytest

from penstock.database.embedded import EmbeddedPostgres
from penstock.errors import Unavailable
from penstock.protocol.queue_options import QueueOptions
from penstock.queues import Item, PopRequest, Queues
from penstock.queues.types import Acked, Message
from tests.conftest import fresh_database
from tests.queues.support import (
    answer,
    complete,
    pop,
    push,
    running,
    values,
)
from tests.support.wait import eventually


class Ledger:
    """What was answered `queued`, and what was delivered and acknowledged."""

    def __init__(self) -> None:
        self.queued: set[str] = set()
        self.unknown: set[str] = set()
        self.delivered: set[str] = set()
        self.settled: Counter[str] = Counter()
        self.order: dict[str, list[tuple[int, int]]] = {}

    async def produce(
        self, queues: Queues, name: str, partition: str, until: float, batch: int = 5
    ) -> None:
        number = 0
        while time.monotonic() < until:
            ids = [f"{name}-{number + k}" for k in range(batch)]
            try:
                answers = await queues.push([Item("q", b"{}", partition, key) for key in ids])
            except Unavailable:
                self.unknown.update(ids)
                await asyncio.sleep(0.05)
            else:
                assert {a.status for a in answers} <= {"queued", "duplicate"}
                self.queued.update(ids)
            number += batch

    async def consume(self, queues: Queues, done: asyncio.Event, **request: Any) -> None:
        while True:
            try:
                popped = await queues.pop(
                    PopRequest(queue="q", batch=50, wait=True, timeout=0.3, **request)
                )
                if not popped.messages:
                    if done.is_set():
                        return
                    continue
            except Unavailable:
                await asyncio.sleep(0.05)
                continue
            self.delivered.update(message.transaction_id for message in popped.messages)
            acked = await self._acknowledge(queues, popped.messages)
            for message, result in zip(popped.messages, acked, strict=True):
                if result.success:
                    self.settled[message.transaction_id] += 1
                    self.order.setdefault(message.partition, []).append((message.seq, 0))

    async def _acknowledge(self, queues: Queues, messages: list[Message]) -> list[Acked]:
        """Until there is an answer: on a slow machine a new connection may be killed before its
        first call has ended, and what nobody acknowledges stays leased.
        """
        while True:
            try:
                return await answer(queues, messages)
            except Unavailable:
                await asyncio.sleep(0.05)

    def check(self) -> None:
        assert len(self.queued) > 10
        lost = self.queued - self.delivered
        assert not lost, f"{len(lost)} of {len(self.queued)} answered queued were never delivered"
        assert self.settled.keys() <= self.queued | self.unknown


async def work(
    ledger: Ledger,
    brokers: list[Queues],
    seconds: float,
    producers: int,
    consumers: int,
    partitions: int,
) -> None:
    done = asyncio.Event()
    until = time.monotonic() + seconds
    eaters = [
        asyncio.create_task(ledger.consume(brokers[n % len(brokers)], done))
        for n in range(consumers)
    ]
    await asyncio.gather(
        *(
            ledger.produce(brokers[n % len(brokers)], f"m{n}", f"p{n % partitions}", until)
            for n in range(producers)
        )
    )
    done.set()
    await asyncio.wait_for(asyncio.gather(*eaters), 60)


def test_a_broker_that_is_alone_notifies_nobody_and_two_find_each_other(database_url: str) -> None:
    async def body() -> None:
        async with running(database_url, poll_interval=60.0) as one:
            await eventually(lambda: one.signals.sent > 0)  # that it is there
            await push(one, "q", 0)
            await complete(one, await pop(one, "q"))
            sent = one.signals.sent
            for number in range(3):
                await push(one, "q", number)
                await complete(one, await pop(one, "q"))
            assert (one.signals.sent, one.signals.alone) == (sent, True)
            async with running(database_url, poll_interval=60.0) as two:
                waiting = asyncio.create_task(pop(two, "q", wait=True, timeout=60))
                await eventually(lambda: not one.signals.alone and not two.signals.alone)
                await push(one, "q", "heard")
                assert values(await asyncio.wait_for(waiting, 30)) == ["heard"]

    asyncio.run(body())


@pytest.mark.parametrize("ordering", ["partition", "none"])
def test_every_queued_message_of_one_busy_partition_is_delivered_once(
    database_url: str, soak: bool, ordering: str
) -> None:
    async def body() -> None:
        async with running(database_url) as queues:
            await queues.admin.configure("q", QueueOptions(ordering=ordering))
            ledger = Ledger()
            await work(ledger, [queues], 10 if soak else 2, 8, 4, 1)
            ledger.check()
            assert set(ledger.settled.values()) == {1}
            if ordering == "partition":
                seqs = [seq for seq, _ in ledger.order["p0"]]
                assert seqs == sorted(seqs)
            assert await queues.groups.lag("q", "__QUEUE_MODE__") == 0

    asyncio.run(body())


def test_several_brokers_share_one_database(database_url: str, soak: bool) -> None:
    async def body() -> None:
        async with AsyncExitStack() as stack:
            brokers = [
                await stack.enter_async_context(running(database_url, poll_interval=30))
                for _ in range(3)
            ]
            ledger = Ledger()
            await work(ledger, brokers, 10 if soak else 2, 6, 6, 3)
            ledger.check()
            assert set(ledger.settled.values()) == {1}
            for broker in brokers:
                await broker.upkeep.roll_up()
            assert await brokers[0].groups.lag("q", "__QUEUE_MODE__") == 0
            # A pop waiting at one broker is woken by a push, and by a release, at another: not by
            # its poll.
            waiting = asyncio.create_task(pop(brokers[0], "q", wait=True, timeout=20))
            await eventually(lambda: brokers[0].signals.waiting)
            began = time.monotonic()
            await push(brokers[1], "q", "hello", partition="p0")
            held = await waiting
            assert values(held) == ["hello"]
            await push(brokers[1], "q", "next", partition="p0")
            waiting = asyncio.create_task(pop(brokers[0], "q", wait=True, timeout=20))
            await eventually(lambda: brokers[0].signals.waiting)
            await complete(brokers[2], held)
            assert values(await waiting) == ["next"]
            assert time.monotonic() - began < 10
            # What one changes, the others follow.
            await brokers[0].admin.delete("q")
            await push(brokers[1], "q", "anew", partition="p0")
            assert values(await pop(brokers[2], "q")) == ["anew"]
            await brokers[0].admin.configure("q", QueueOptions(lease_time=77))
            await eventually(lambda: _lease_time(brokers[1]), 10)

    async def _lease_time(broker: Queues) -> bool:
        return bool((await broker.admin.describe("q")).options.lease_time == 77)

    asyncio.run(body())


def test_brokers_encrypt_as_soon_as_any_of_them_was_told_to(database_url: str) -> None:
    async def body() -> None:
        async with (
            running(database_url, encryption_key="33" * 32) as one,
            running(database_url, encryption_key="33" * 32) as two,
        ):
            await push(two, "q", "clear")
            await one.admin.configure("q", QueueOptions(encryption_enabled=True))
            await push(two, "q", "secret")
            rows = await one.database.fetch("SELECT payload FROM messages ORDER BY seq")
            assert rows[0]["payload"] == b'"clear"'
            assert b"secret" not in rows[1]["payload"]

    asyncio.run(body())


@pytest.mark.timeout(300)
def test_killing_our_connections_again_and_again_loses_nothing(
    database_url: str, soak: bool
) -> None:
    async def body() -> None:
        async with running(database_url) as queues:
            await queues.admin.configure("q", QueueOptions(lease_time=600))
            ledger = Ledger()
            killer = await asyncpg.connect(database_url)
            stop = asyncio.Event()

            async def kill() -> int:
                kills = 0
                while not stop.is_set():
                    before = len(ledger.queued)
                    kills += await killer.fetchval(
                        """SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                            WHERE application_name = 'penstock' AND datname = current_database()"""
                    )
                    await asyncio.sleep(0.25)
                    # A slow machine needs longer for a new connection and a call on it.
                    await eventually(
                        lambda before=before: len(ledger.queued) > before or stop.is_set(), 60
                    )
                return kills

            async def drained() -> bool:
                await ledger.consume(queues, done)
                return await queues.groups.lag("q", "__QUEUE_MODE__") == 0

            killing = asyncio.create_task(kill())
            await asyncio.sleep(0)
            until = time.monotonic() + (30 if soak else 3)
            done = asyncio.Event()
            eaters = [asyncio.create_task(ledger.consume(queues, done)) for _ in range(4)]
            await asyncio.gather(
                *(ledger.produce(queues, f"m{n}", f"p{n % 3}", until) for n in range(6))
            )
            stop.set()
            kills = await killing
            done.set()
            await asyncio.wait_for(asyncio.gather(*eaters), 60)
            await killer.close()
            assert kills > 10
            # Leases live for ten minutes, and a lost answer must not have left one behind: at the
            # latest when the call that was cut off has surely ended, what it took is returned.
            await eventually(drained, 60)
            ledger.check()
            assert set(ledger.settled.values()) == {1}

    asyncio.run(body())


@pytest.mark.timeout(300)
def test_a_restart_of_postgres_in_the_middle_loses_nothing(
    own_postgres: EmbeddedPostgres, soak: bool
) -> None:
    url = fresh_database(own_postgres)

    async def body() -> None:
        async with running(url) as queues:
            await queues.admin.configure("q", QueueOptions(lease_time=5, retry_limit=100))
            ledger = Ledger()
            for mode in ("fast", "immediate") * (5 if soak else 1):
                working = asyncio.create_task(work(ledger, [queues], 2, 4, 3, 3))
                await asyncio.sleep(0.7)
                await asyncio.to_thread(own_postgres.stop, mode)
                await asyncio.to_thread(own_postgres.start)
                await working
            done = asyncio.Event()
            done.set()

            async def drained() -> bool:
                await ledger.consume(queues, done)
                return await queues.groups.lag("q", "__QUEUE_MODE__") == 0

            await eventually(drained, 30)
            ledger.check()

    asyncio.run(body())
