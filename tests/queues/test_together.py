"""Many producers and consumers, several brokers, a database that is interrupted: nothing is lost,
nothing doubled.
"""

import asyncio
import json
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import pytest

from penstock.database.embedded import EmbeddedPostgres
from penstock.errors import Unavailable
from penstock.queues import Ack, Item, PopRequest, Queues
from penstock.queues.schema import SCHEMA
from tests.conftest import fresh_database
from tests.queues.support import answer, complete, pop, push, running, values
from tests.support.wait import eventually


class Ledger:
    """What was answered `queued`, and what was delivered and acknowledged."""

    def __init__(self) -> None:
        self.queued: set[str] = set()
        self.unknown: set[str] = set()
        self.delivered: set[str] = set()
        self.settled: Counter[str] = Counter()  # without those whose acknowledgement got no answer
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
                self.delivered.update(message.transaction_id for message in popped.messages)
                acked = await answer(queues, popped.messages)
            except Unavailable:
                await asyncio.sleep(0.05)
                continue
            for message, result in zip(popped.messages, acked, strict=True):
                if result.success:
                    self.settled[message.transaction_id] += 1
                    self.order.setdefault(message.partition, []).append((message.seq, 0))

    def check(self) -> None:
        assert len(self.queued) > 50
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


@pytest.mark.parametrize("ordering", ["partition", "none"])
def test_every_queued_message_of_one_busy_partition_is_delivered_once(
    database_url: str, soak: bool, ordering: str
) -> None:
    async def body() -> None:
        async with running(database_url) as queues:
            await queues.admin.configure("q", {"ordering": ordering})
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
            await brokers[0].admin.configure("q", {"leaseTime": 77})
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
            await one.admin.configure("q", {"encryptionEnabled": True})
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
            await queues.admin.configure("q", {"leaseTime": 600})
            ledger = Ledger()
            killer = await asyncpg.connect(database_url)
            stop = asyncio.Event()

            async def kill() -> int:
                kills = 0
                while not stop.is_set():
                    kills += await killer.fetchval(
                        """SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                            WHERE application_name = 'penstock' AND datname = current_database()"""
                    )
                    await asyncio.sleep(0.25)
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
            await queues.admin.configure("q", {"leaseTime": 5, "retryLimit": 100})
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


def test_pushes_acks_and_transactions_over_the_same_partitions_never_deadlock(
    database_url: str, soak: bool
) -> None:
    async def body() -> None:
        async with running(database_url) as one, running(database_url) as two:
            await one.admin.configure(
                "q", {"ordering": "none", "retryDelay": 0, "retryLimit": 1000}
            )
            partitions = [f"p{n}" for n in range(6)]
            await one.push([Item("q", b"{}", p) for p in partitions])
            until = time.monotonic() + (20 if soak else 2)

            async def worker(queues: Queues, seed: int) -> None:
                turn = seed
                while time.monotonic() < until:
                    turn += 1
                    order = partitions[turn % 6 :] + partitions[: turn % 6]
                    await queues.push(
                        [Item("q", b"{}", p) for p in (order if turn % 2 else reversed(order))]
                    )
                    popped = await queues.pop(PopRequest(queue="q", batch=12, partitions=6))
                    acks = [
                        Ack(
                            m.transaction_id,
                            m.partition_id,
                            m.lease_id,
                            ("completed", "failed", "retry")[n % 3],
                        )
                        for n, m in enumerate(popped.messages)
                    ]
                    if turn % 3 == 0:
                        pushes = [Item("q", b"{}", p) for p in order[:3]]
                        assert (await queues.transaction([*acks, *pushes])).success
                    else:
                        await queues.ack(acks[::-1])
                    if turn % 5 == 0:
                        await queues.groups.listing(queue="q")
                        await queues.upkeep.roll_up()

            await asyncio.gather(
                *(worker(queues, seed) for seed in range(3) for queues in (one, two))
            )
            rows = await one.database.fetch(
                "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
            )
            assert rows[0]["deadlocks"] == 0

    asyncio.run(body())


def test_a_new_group_on_many_partitions_finds_what_there_is(database_url: str, soak: bool) -> None:
    async def body() -> None:
        count = 100_000 if soak else 3000
        async with running(database_url) as queues:
            for start in range(0, count, 1000):
                await queues.push([Item("q", b"1", f"p{n}") for n in range(start, start + 1000)])
            await queues.admin.clear("q")
            await push(queues, "q", "needle", partition=f"p{count - 5}")
            assert values(await pop(queues, "q", group="late", wait=True, timeout=60)) == ["needle"]
            assert (await pop(queues, "q", group="fresh", subscription_mode="new")).messages == []
            await push(queues, "q", "later", partition="p7")
            assert values(await pop(queues, "q", group="fresh", wait=True, timeout=60)) == ["later"]
            while (await queues.groups.listing("fresh", "q"))[0]["discovering"]:
                assert (await pop(queues, "q", group="fresh")).messages == []
            assert await queues.groups.lag("q", "fresh") == 1

    asyncio.run(body())


def test_what_commits_late_is_seen_by_reads_over_transaction_ids(database_url: str) -> None:
    """What the Spark source relies on: reading up to the oldest running transaction never skips a
    message.
    """

    async def body() -> None:
        async with running(database_url) as queues:
            await push(queues, "q", 0)
            late = await asyncpg.connect(
                database_url, server_settings={"search_path": SCHEMA.search_path("penstock")}
            )
            transaction = late.transaction()
            await transaction.start()
            partition = await queues.catalog.partition("q", "Default")
            await queues.push([Item("q", b"{}", "other")])
            other = await queues.catalog.partition("q", "other")
            await late.fetch(
                """SELECT * FROM queue_push(ARRAY[$1::bigint], ARRAY[0], ARRAY['late'], ARRAY[true],
                     ARRAY[NULL::uuid], ARRAY[NULL::text], ARRAY[NULL::text], ARRAY['1'::bytea])""",
                partition,
            )
            await push(queues, "q", 2, partition="other")
            read = """SELECT transaction_id FROM messages WHERE queue_id = (SELECT id FROM queues WHERE name = 'q')
                         AND xid >= $1::text::xid8 AND xid < $2::text::xid8"""
            horizon = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text"
            upto = (await queues.database.fetch(horizon))[0][0]
            first = await queues.database.fetch(read, "0", upto)
            await transaction.commit()
            await late.close()
            end = (await queues.database.fetch(horizon))[0][0]
            second = await queues.database.fetch(read, upto, end)
            ids = [row[0] for row in (*first, *second)]
            assert "late" in [row[0] for row in second]
            assert len(ids) == len(set(ids)) == 4
            assert other != partition

    asyncio.run(body())


def test_the_payload_is_whole_json_after_everything(database_url: str) -> None:
    async def body() -> None:
        async with running(database_url) as queues:
            big = {"text": "x" * 300_000, "n": list(range(1000))}
            await push(queues, "q", big)
            (message,) = (await pop(queues, "q")).messages
            assert json.loads(message.payload) == big

    asyncio.run(body())
