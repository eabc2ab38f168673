"""Consumers with state while workers and the broker are killed (kill -9): at every moment the state
is the fold of what is acknowledged, and in the end of all messages, each once and in order.
"""

import asyncio
import random
import subprocess
import sys
from functools import reduce
from pathlib import Path

import asyncpg
import pytest

from penstock import Client
from tests.chaos.stream_worker import GROUP, OUT, QUEUE, fold
from tests.support import guard
from tests.support.broker import BrokerProcess
from tests.support.form import pick
from tests.support.wait import eventually

pytestmark = pytest.mark.xdist_group("queue-restart")

PARTITIONS = [f"p{n}" for n in range(6)]
PER_PARTITION = pick(short=40, usual=120, soak=1500)
KILLS = pick(short=3, usual=8, soak=80)
WORKERS = 3
PROGRAM = Path(__file__).with_name("stream_worker.py")
# In one statement, so of one moment: what is acknowledged in each partition, and what is in its state.
BOOKS = """
SELECT p.name, c.consumed, coalesce((n.value #>> '{}')::bigint, 0) AS n, coalesce(d.value #>> '{}', '') AS digest
  FROM queues q JOIN partitions p ON p.queue_id = q.id
  JOIN groups g ON g.queue_id = q.id AND g.name = $2
  JOIN LATERAL (SELECT * FROM cursors c WHERE c.partition_id = p.id AND c.group_id = g.id
                 ORDER BY c.version DESC LIMIT 1) c ON true
  LEFT JOIN stream_state n ON n.partition_id = p.id AND n.key = 'n'
  LEFT JOIN stream_state d ON d.partition_id = p.id AND d.key = 'digest'
 WHERE q.name = $1"""


def start(url: str) -> subprocess.Popen[bytes]:
    worker = subprocess.Popen([sys.executable, str(PROGRAM), url], start_new_session=True)
    guard.watch(worker.pid)
    return worker


async def test_state_is_the_fold_of_what_is_acknowledged(database_url, tmp_path) -> None:
    digests = [""]
    for value in range(PER_PARTITION):
        digests.append(fold(digests[-1], value))
    chance = random.Random(7)
    workers: list[subprocess.Popen[bytes]] = []
    with BrokerProcess(tmp_path, database_url=database_url) as broker:
        connection = await asyncpg.connect(
            database_url, server_settings={"search_path": "penstock"}
        )
        try:
            async with Client(broker.url, retry_for=90) as client:
                # a message may be delivered often: what counts is what is acknowledged
                await client.configure(QUEUE, lease_time=2, retry_limit=1000, retry_delay=0)
                workers += [start(broker.url) for _ in range(WORKERS)]

                async def books() -> int:
                    rows = await connection.fetch(BOOKS, QUEUE, GROUP)
                    for row in rows:
                        assert row["n"] == row["consumed"], dict(row)
                        assert row["digest"] == digests[row["n"]], dict(row)
                    return sum(row["n"] for row in rows)

                async def feed() -> None:
                    for value in range(PER_PARTITION):
                        for partition in PARTITIONS:
                            await client.push(QUEUE, value, partition=partition)

                async def kill(steps: int) -> None:
                    """Between two kills something is done."""
                    for step in range(steps):
                        before = await books()

                        async def advanced(before: int = before) -> bool:
                            done = await books()
                            return done > before or done == PER_PARTITION * len(PARTITIONS)

                        await eventually(advanced, 90)
                        if step % 3 == 2:
                            await asyncio.to_thread(broker.kill)
                            await asyncio.to_thread(broker.start)
                        else:
                            place = chance.randrange(WORKERS)
                            workers[place].kill()
                            workers[place].wait()
                            workers[place] = start(broker.url)

                await asyncio.gather(feed(), kill(KILLS))

                async def all_done() -> bool:
                    return await books() == PER_PARTITION * len(PARTITIONS)

                await eventually(all_done, 120)
                rows = await connection.fetch(
                    """SELECT m.partition, m.payload FROM queue_messages m
                        WHERE m.queue = $1 ORDER BY m.partition, m.seq""",
                    OUT,
                )
                passed: dict[str, list[int]] = {}
                for row in rows:
                    passed.setdefault(row["partition"], []).append(int(row["payload"]))
                assert passed == {name: list(range(PER_PARTITION)) for name in PARTITIONS}
                assert reduce(fold, passed["p0"], "") == digests[-1]
                assert (await client.admin.dead_letters(QUEUE)).total == 0
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
            await connection.close()
