"""kill -9 of a real process that exports, at any moment, again and again."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.export.making import exports, http_route, status_of
from tests.export.scripted import ScriptedDestination
from tests.support.api import Api
from tests.support.broker import BrokerProcess
from tests.support.wait import eventually, until

RUNNER = Path(__file__).parents[1] / "export/runner.py"


def start(directory: Path, url: str, first: int, **queue: object) -> subprocess.Popen[str]:
    spec = http_route(url, workers=2, **queue)
    return subprocess.Popen(
        [sys.executable, str(RUNNER), str(directory), json.dumps(spec), str(first)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=RUNNER.parents[2],
    )


async def read_until_killed(
    process: subprocess.Popen[str], random: Random, least: int
) -> tuple[int, int]:
    """Kill it at a random moment after it has acknowledged `least` records; the last number
    acknowledged, and tried.
    """
    acknowledged = tried = -1
    assert process.stdout is not None
    loop = asyncio.get_running_loop()
    goal: int | None = None
    killed = False
    while line := await loop.run_in_executor(None, process.stdout.readline):
        word, number = line.split()
        if word == "ack":
            acknowledged = int(number)
            goal = acknowledged + least + random.randint(0, 200) if goal is None else goal
            if acknowledged >= goal and not killed:
                killed = True
                os.kill(process.pid, signal.SIGKILL)
        else:
            tried = int(number)
    process.wait()
    return acknowledged, tried


@pytest.mark.parametrize("policy", ["always", "interval"])
async def test_a_killed_process_loses_nothing_it_acknowledged(
    tmp_path: Path, policy: str, soak: bool
):
    random = Random(7)
    kills = 30 if soak else 2
    async with ScriptedDestination() as destination:
        promised: set[int] = set()
        first = 0
        for _ in range(kills):
            process = start(
                tmp_path,
                destination.url,
                first,
                fsync=policy,
                inmemory_blocks=4,
                chunk_size=20000,
            )
            acknowledged, tried = await read_until_killed(process, random, 100)
            assert acknowledged > first
            promised.update(range(first, acknowledged + 1))
            first = max(acknowledged, tried) + 1
        async with exports(tmp_path, {"r": http_route(destination.url)}) as running:
            route = running.get("r")
            await eventually(lambda: route.queue.count == 0, 30)
            status = status_of(route)["queue"]["accounting"]
        assert promised <= set(destination.ids)
        assert set(destination.ids) <= set(range(first))
        assert status["queued"] == 0
        assert status["accepted"] == status["delivered"] == len(set(destination.ids))
        by_record: dict[int, set[str]] = {}
        for received in destination.ledger:
            for each in received.ids:
                by_record.setdefault(each, set()).add(received.key)
        assert all(len(keys) == 1 for keys in by_record.values()), (
            "what came twice came under the same key"
        )
        doubles = len(destination.ids) - len(set(destination.ids))
        assert doubles <= kills * 2 * 10, "at most what two workers held at each kill"


async def test_under_never_a_kill_loses_at_most_what_was_in_memory(tmp_path: Path):
    random = Random(3)
    destination = ScriptedDestination()
    await destination.open()
    url = destination.url
    destination.close()  # nothing is delivered: what is lost was only in memory
    process = start(tmp_path, url, 0, fsync="never", inmemory_blocks=8, max_size=100_000)
    acknowledged, _ = await read_until_killed(process, random, 1000)
    await destination.open()
    async with exports(
        tmp_path, {"r": http_route(destination.url, fsync="never", max_size=100_000)}
    ) as running:
        route = running.get("r")
        await eventually(lambda: route.queue.count == 0, 30)
        status = status_of(route)["queue"]["accounting"]
    destination.close()
    assert status["queued"] == 0
    delivered = set(destination.ids)
    assert delivered == set(range(len(delivered))), (
        "what is left has no holes: only the end is gone"
    )
    assert acknowledged + 1 - len(delivered) <= 3 * 8 * 10, (
        "memory holds 8 blocks, a spill under way twice that"
    )


async def test_after_a_kill_a_route_reads_its_queue_on_at_once_whatever_the_lease_time(
    tmp_path: Path, database_url: str
):
    destination = ScriptedDestination()
    await destination.open()
    destination.close()  # the send queue fills up while messages are leased
    with (
        BrokerProcess(tmp_path, database_url=database_url) as broker,
        httpx.Client(base_url=broker.url, timeout=30) as http,
    ):
        api = Api(http)
        api.configure("orders", leaseTime=3600)
        api.push("orders", *({"id": number, "pad": "x" * 900} for number in range(10)))
        api.push("orders", {"id": -1}, partition="theirs")
        [theirs] = api.get("pop/queue/orders/partition/theirs?consumerGroup=lake")["messages"]
        spec = http_route(destination.url, batch={"records": 10, "bytes": 1000}, max_size=4)
        api.post(
            "routes", {"name": "r", "source": {"queue": "orders", "group": "lake"}, **spec}, 201
        )
        until(lambda: api.get("routes/r")["queue"]["batches"] == 4)
        assert api.get("routes/r")["lag"] == 11
        broker.kill()

        await destination.open()
        broker.start()
        await eventually(lambda: set(destination.ids) == set(range(10)))
        assert "1 unused leases on queue orders are released" in broker.log
        api.push("orders", {"id": 10})
        await eventually(lambda: 10 in destination.ids)
        [acked] = api.ack(theirs, group="lake")
        assert acked["success"], "the lease of another consumer of the group is untouched"
        await eventually(lambda: api.get("routes/r")["lag"] == 0)
    destination.close()
