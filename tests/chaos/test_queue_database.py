"""Queues whose database is interrupted while they are used: nothing is lost, nothing doubled."""

import asyncio
import time

import asyncpg
import pytest

from penstock.database.embedded import EmbeddedPostgres
from penstock.protocol.queue_options import QueueOptions
from tests.conftest import create_database
from tests.queues.ledger import Ledger, work
from tests.queues.support import running
from tests.support.wait import eventually


@pytest.mark.timeout(300)
async def test_killing_our_connections_again_and_again_loses_nothing(
    database_url: str, soak: bool
) -> None:
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


@pytest.mark.timeout(300)
async def test_a_restart_of_postgres_in_the_middle_loses_nothing(
    own_postgres: EmbeddedPostgres, soak: bool
) -> None:
    url = await create_database(own_postgres)

    async with running(url) as queues:
        await queues.admin.configure("q", QueueOptions(lease_time=5, retry_limit=100))
        ledger = Ledger()
        for mode in ("fast", "immediate") * (5 if soak else 1):
            queued = len(ledger.queued)
            working = asyncio.create_task(work(ledger, [queues], 2, 4, 3, 3))
            await eventually(lambda n=queued: len(ledger.queued) > n + 20)
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
