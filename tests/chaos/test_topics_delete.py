"""Topics in a tier are deleted and created again while producers append and the disk is busy: what
is acknowledged after a deletion was answered can be read, also after a kill.
"""

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.client import Client
from penstock.errors import NotFound
from tests.chaos.test_topics_kill import Victim
from tests.support.form import pick
from tests.support.wait import eventually

ROUNDS = pick(short=1, usual=2, soak=20)  # each ends with a kill
TOPICS = pick(short=3, usual=5, soak=15)
DELETIONS = pick(short=2, usual=3, soak=6)  # of each topic, in each round
PRODUCERS = 2  # of each topic
ENOUGH = 25  # records between two deletions: some segments of them
LIMIT = 90.0  # seconds for a topic to take so many


@dataclass
class Ledger:
    """The records of one topic that were acknowledged since the last deletion."""

    topic: str
    deletions: int = 0  # that were answered
    acknowledged: set[bytes] = field(default_factory=set)

    def acknowledge(self, payload: bytes, deletions: int) -> None:
        """`deletions`: how many were answered when it was sent."""
        if deletions == self.deletions:
            self.acknowledged.add(payload)

    def delete(self) -> None:
        self.deletions += 1
        self.acknowledged = set()


async def produce(address: str, ledger: Ledger, producer: str) -> None:
    async with Client(topics=address, timeout=60) as client:
        number = 0
        while True:
            payload, deletions = f"{producer}:{number} {'x' * 60}".encode(), ledger.deletions
            number += 1
            with contextlib.suppress(NotFound):  # deleted after the record had arrived
                await client.topic(ledger.topic).produce(payload)
                ledger.acknowledge(payload, deletions)


async def delete_often(client: Client, ledger: Ledger) -> None:
    for _ in range(DELETIONS):
        await taken(ledger)
        await client.topic(ledger.topic).delete()
        ledger.delete()
    await taken(ledger)


async def taken(ledger: Ledger) -> None:
    """Wait until the topic has taken some more records."""
    enough = len(ledger.acknowledged) + ENOUGH
    await eventually(lambda: len(ledger.acknowledged) >= enough, timeout=LIMIT)


async def check(client: Client, ledger: Ledger) -> None:
    expected = set(ledger.acknowledged)
    payloads: list[bytes] = []
    offsets: list[int] = []
    async with client.topic(ledger.topic).reader(follow=False) as reader:
        async for record in reader:
            payloads.append(record.payload)
            offsets.append(record.offset)
    assert offsets == [*range(len(offsets))]
    assert not expected - set(payloads), f"{ledger.topic}: acknowledged, and not there"
    assert max(Counter(payloads).values()) == 1
    assert (await client.topic(ledger.topic).info()).damaged == 0


@pytest.mark.timeout(60 + 4 * LIMIT * ROUNDS)
async def test_what_is_acknowledged_after_a_deletion_is_there_and_stays(tmp_path: Path) -> None:
    victim = Victim(tmp_path / "data", "group", f"file://{tmp_path}/store")
    await victim.start()
    ledgers = [Ledger(f"topic-{number}") for number in range(TOPICS)]
    address = f"127.0.0.1:{victim.port}"
    producers = [
        asyncio.ensure_future(produce(address, ledger, f"producer-{number}"))
        for ledger in ledgers
        for number in range(PRODUCERS)
    ]
    try:
        async with Client(topics=address, timeout=60) as client:
            for _ in range(ROUNDS):
                await asyncio.gather(*(delete_often(client, ledger) for ledger in ledgers))
                await asyncio.gather(*(check(client, ledger) for ledger in ledgers))
                victim.kill()
                await victim.start()
                await asyncio.gather(*(check(client, ledger) for ledger in ledgers))
                await asyncio.gather(*(taken(ledger) for ledger in ledgers))
            assert not any(producer.done() for producer in producers)
            assert sum(ledger.deletions for ledger in ledgers) == ROUNDS * TOPICS * DELETIONS
    finally:
        for producer in producers:
            producer.cancel()
        await asyncio.gather(*producers, return_exceptions=True)
        victim.kill()
