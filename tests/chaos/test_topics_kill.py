"""kill -9 while producers run, again and again: every answered record is there, in order, once,
without gaps.
"""

import asyncio
import contextlib
import random
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.client import Client
from penstock.protocol.record_batch import Batch
from tests.support import guard
from tests.support.form import SOAK
from tests.support.wait import eventually

KILLS = 50 if SOAK else 3
PRODUCERS = 4


class Victim:
    """A server that is killed and started again on the same port and directory."""

    def __init__(self, directory: Path, fsync: str, *tier: str) -> None:
        self._directory, self._fsync, self._tier = directory, fsync, tier
        self.port = 0
        self._process: subprocess.Popen[str] | None = None

    async def start(self) -> None:
        self._process = await asyncio.to_thread(self._start)

    def _start(self) -> subprocess.Popen[str]:
        started = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.topic_process",
                str(self._directory),
                self._fsync,
                str(self.port),
                *self._tier,
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        guard.watch(started.pid)
        assert started.stdout is not None
        self.port = int(started.stdout.readline())
        return started

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


@pytest.mark.parametrize("fsync", ["group", "interval"])
@pytest.mark.timeout(120 + 6 * KILLS)
async def test_kill_9_loses_nothing_that_was_answered_and_repeats_nothing(
    tmp_path: Path, fsync: str
) -> None:
    await killing(tmp_path, fsync)


async def killing(directory: Path, fsync: str) -> None:
    victim = Victim(directory, fsync)
    await victim.start()
    stop = asyncio.Event()
    answered: dict[int, dict[int, int]] = {
        number: {} for number in range(PRODUCERS)
    }  # producer: record -> offset
    seen: list[tuple[int, bytes]] = []
    choose = random.Random(fsync)
    client = Client(topics=f"127.0.0.1:{victim.port}", timeout=60)

    async def produce(number: int) -> None:
        record = 0
        async with client.topic("t").producer(
            linger=0.001, max_batch_records=choose.choice([1, 7, 100])
        ) as producer:
            while not stop.is_set():
                deliveries = []
                for _ in range(choose.randrange(1, 200)):
                    size = choose.choice([0, 10, 100, 3000])
                    payload = b"%d:%d:" % (number, record) + b"x" * size
                    deliveries.append((record, await producer.send(payload)))
                    record += 1
                for which, delivery in deliveries:
                    answered[number][which] = await delivery

    async def read() -> None:
        async with client.topic("t").reader(wait=0.5) as reader:
            async for batch in reader.batches():
                seen.extend(batch)

    await client.topic("t").create()
    producers = [asyncio.ensure_future(produce(number)) for number in range(PRODUCERS)]
    reading = asyncio.ensure_future(read())
    try:
        for _ in range(KILLS):
            before = sum(map(len, answered.values()))
            # It is at work again.
            await eventually(
                lambda before=before: sum(map(len, answered.values())) >= before + 300, timeout=40
            )
            await asyncio.sleep(choose.random() * 0.2)
            victim.kill()
            await victim.start()
        stop.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*producers)
            records = await everything(client)
            await eventually(lambda: len(seen) >= len(records), timeout=40)
    finally:
        reading.cancel()
        for task in producers:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        await client.close()
        victim.kill()

    assert [offset for offset, _ in records] == [*range(len(records))]
    assert seen == records  # a reader that followed through all kills saw the same
    at: dict[int, list[int]] = {number: [] for number in range(PRODUCERS)}
    for offset, payload in records:
        number, record, _ = payload.split(b":", 2)
        at[int(number)].append(int(record))
        assert answered[int(number)][int(record)] == offset
    for number, result in at.items():
        assert result == [*range(len(answered[number]))]  # in order, once, none missing
    assert len(records) >= 300 * KILLS


async def everything(client: Client) -> list[tuple[int, bytes]]:
    collected: list[tuple[int, bytes]] = []
    async with client.topic("t").reader(follow=False) as reader:
        batch: Batch
        async for batch in reader.batches():
            collected += [*batch]
    return collected
