"""Exactly-once processing: workers are killed at any moment, and every effect is there once."""

import asyncio
import multiprocessing
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from penstock import Client, outbox
from penstock.database.embedded import EmbeddedPostgres
from tests.outbox import worker as worker_program
from tests.outbox.support import database_with_effects
from tests.support import guard
from tests.support.broker import BrokerProcess

PARTITIONS, WORKERS = 20, 3


@pytest.mark.timeout(1800)
async def test_every_effect_is_there_once_though_workers_are_killed(
    postgres: EmbeddedPostgres, tmp_path: Path, soak: bool, caplog: pytest.LogCaptureFixture
) -> None:
    database_url = await asyncio.to_thread(database_with_effects, postgres)
    queue = "work"
    count, min_kills = (10_000, 40) if soak else (120, 3)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.outbox.worker"])  # so that a new one is there at once
    workers: list[Any] = []

    def start_worker(broker: BrokerProcess) -> Any:
        worker = processes.Process(
            target=worker_program.run, args=(broker.url, database_url, queue), daemon=True
        )
        worker.start()
        guard.watch(worker.pid)
        return worker

    async def body(broker: BrokerProcess) -> int:
        connection = await asyncpg.connect(database_url)
        kills = done = 0
        for begin in range(0, count, 20):
            async with connection.transaction():
                for n in range(begin, begin + 20):
                    await outbox.push(connection, queue, n, partition=f"p{n % PARTITIONS}")
        deadline = time.monotonic() + 1500
        while done < count:
            assert time.monotonic() < deadline, f"{done} of {count} after {kills} kills"
            last = done
            done = await connection.fetchval(
                "SELECT count(DISTINCT work) FROM effects WHERE queue = $1", queue
            )
            # once in a while, while they are at work
            if kills < min_kills * done / (0.8 * count) and done > last:
                victim = random.randrange(WORKERS)
                workers[victim].kill()
                await asyncio.to_thread(workers[victim].join)
                workers[victim] = start_worker(broker)
                kills += 1
            await asyncio.sleep(random.uniform(0, 0.05))
        effects = Counter(
            row[0]
            for row in await connection.fetch("SELECT work FROM effects WHERE queue = $1", queue)
        )
        assert effects == dict.fromkeys(map(str, range(count)), 1)
        async with Client(broker.url) as client:  # nobody is warned of a lease that has ended so
            (message,) = await client.pop(f"{queue}@another")
            async with connection.transaction():
                await outbox.ack(connection, message)
            # A lease of a second is extended three times a second.
            assert await client.pop("empty", wait=1.0) == []
            assert "lease was lost" not in caplog.text
        await connection.close()
        return kills

    with BrokerProcess(tmp_path, database_url=database_url) as broker:
        try:
            options = {"leaseTime": 1, "retryLimit": 1000}
            httpx.post(
                f"{broker.url}/api/v1/configure", json={"queue": queue, "options": options}
            ).raise_for_status()
            workers += [start_worker(broker) for _ in range(WORKERS)]
            assert await body(broker) >= min_kills
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
