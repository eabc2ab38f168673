"""Producers and consumers at work, and a ledger of what was answered and what was delivered."""

import asyncio
import time
from collections import Counter
from typing import Any

from penstock.errors import Unavailable
from penstock.queues import Item, PopRequest, Queues
from penstock.queues.types import AckOutcome, Delivered
from tests.queues.support import answer


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

    async def _acknowledge(self, queues: Queues, messages: list[Delivered]) -> list[AckOutcome]:
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
