"""Where a route's records come from: readers that fill the send queue.

A topic is read by offset. How far is written into each block itself (`position`), so what is in the queue and how far
the source was read can never disagree: after a kill the reader goes on exactly behind the last block on disk. A topic
that was deleted and made anew starts again at 0: the upper 16 bits of a position count incarnations. A topic that is
not there is waited for, and not made: somebody who deletes a topic means it.

A queue is read through a consumer group: pop, put into the send queue as durably as the route promises, then ack. A
crash in between gives the messages out again, and they may then be delivered twice. Nothing is popped before there is
room for it, so an outage of the destination lets no lease run out.

A reader never drops: when the send queue is full, or the disk is, it waits. What ages out of a topic before it was
read is counted as dropped{reason="source_gap"}.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol

from penstock.errors import Damaged, Full, NotFound, PenstockError, StorageFailed, StorageFull, TooLarge, Unavailable
from penstock.export.block import Block
from penstock.export.clock import Clock
from penstock.export.journal import SOURCE_GAP
from penstock.export.payload import RAW, join
from penstock.export.ports import QueuePort, TopicPort, TopicsPort
from penstock.export.sendqueue import SendQueue
from penstock.export.spec import Batching

log = logging.getLogger("penstock.export")
RETRY = 1.0
AHEAD = 8  # batches read and pushed together when the source is far ahead
POLL = 30.0
GENERATION_BITS = 48
OFFSET_MASK = (1 << GENERATION_BITS) - 1


class Source(Protocol):
    async def run(self) -> None:
        """Fill the send queue until cancelled."""

    problem: str | None  # why nothing can be read, while that is so

    def lag(self) -> int | None:
        """Records not read yet, if that is known."""


def make_blocks(
    records: list[bytes], encoding: int, batch: Batching, position: Callable[[int], int] | None = None
) -> list[Block]:
    """Records as blocks of at most `batch` size. `position`: where the source goes on behind the n-th record."""
    blocks = []
    start, size = 0, 0
    most = 1 if encoding == RAW else batch.records
    if 0 < len(records) <= most and sum(map(len, records)) <= batch.bytes:
        return [_block(records, 0, len(records), encoding, position)]
    for at, record in enumerate(records):
        if at > start and (at - start >= most or size + len(record) > batch.bytes):
            blocks.append(_block(records, start, at, encoding, position))
            start, size = at, 0
        size += len(record)
    if records:
        blocks.append(_block(records, start, len(records), encoding, position))
    return blocks


def _block(records: list[bytes], start: int, stop: int, encoding: int, position: Callable[[int], int] | None) -> Block:
    block = Block(join(records[start:stop], encoding), stop - start, encoding)
    if position is not None:
        block.position = position(stop - 1)
    return block


class Generations(Protocol):
    """Remembers which incarnation of a topic was which generation (kept with the route)."""

    async def generation_of(self, incarnation: str) -> int: ...


class TopicSource:
    def __init__(
        self,
        route: str,
        topics: TopicsPort,
        topic: str,
        start: str,
        batch: Batching,
        encoding: int,
        queue: SendQueue,
        pool: Executor,
        clock: Clock,
        generations: Generations,
        dropped: Callable[[int, str], None],
    ) -> None:
        self._route, self._topics, self._name, self._start = route, topics, topic, start
        self._batch, self._encoding, self._queue = batch, encoding, queue
        self._pool, self._clock, self._generations, self._dropped = pool, clock, generations, dropped
        self._read: int | None = None  # the next offset to read
        self._start_was_seen = True  # whether the topic was there when the route began to look
        self.problem: str | None = None

    def lag(self) -> int | None:
        topic = self._topics.get(self._name)
        read = self._read
        if read is None and (position := self._queue.fast.state.position) >= 0:
            read = position & OFFSET_MASK  # nobody reads yet: where the queue ends
        return None if topic is None or read is None else max(0, topic.next_offset - read)

    async def run(self) -> None:
        while True:
            try:
                topic = self._topics.get(self._name)
                if topic is None:
                    self._start_was_seen = False
                    raise NotFound(f"there is no topic {self._name}")
                self.problem = None
                await self._read_topic(topic)
            except (NotFound, Unavailable, StorageFull, StorageFailed, Damaged) as error:
                if self.problem != str(error):
                    log.warning("route %s: topic %s cannot be read, trying again: %s", self._route, self._name, error)
                self.problem = str(error)
                await self._clock.sleep(RETRY)

    async def _read_topic(self, topic: TopicPort) -> None:
        generation = await self._generations.generation_of(topic.incarnation)
        position = self._queue.fast.state.position
        if position >= 0 and position >> GENERATION_BITS == generation:
            offset = position & OFFSET_MASK
        else:
            offset = self._first(topic) if generation == 0 else 0
        self._read = offset
        while True:
            if not await topic.wait_for(offset, POLL):
                if self._topics.get(self._name) is not topic:
                    raise NotFound(f"topic {self._name} was deleted")
                continue
            if self._batch.linger and topic.next_offset - offset < self._batch.records:
                await self._clock.sleep(self._batch.linger)
            if offset < topic.first_offset:
                self._gap(offset, topic.first_offset)
                offset = topic.first_offset
            batches: list[Any] = []
            while len(batches) < AHEAD:
                found = topic.read(offset, self._batch.records, self._batch.bytes)
                if not found.count:
                    break
                batches.append(found)
                offset = found.next_offset
                if topic.next_offset - offset < self._batch.records:
                    break
            blocks = await asyncio.get_running_loop().run_in_executor(self._pool, self._make, batches, generation)
            await push_patiently(self._route, self._queue, blocks, self._clock)
            self._read = offset

    def _make(self, batches: list[Any], generation: int) -> list[Block]:
        blocks = []
        for found in batches:

            def position(at: int, found: Any = found) -> int:
                following = found.offsets[at + 1] if at + 1 < found.count else found.next_offset
                return generation << GENERATION_BITS | int(following)

            blocks += make_blocks(found.payloads(), self._encoding, self._batch, position)
        return blocks

    def _first(self, topic: TopicPort) -> int:
        if self._start == "latest":  # of a topic that came later, everything is
            return topic.next_offset if self._start_was_seen else topic.first_offset
        return int(self._start) if self._start.isdigit() else topic.first_offset

    def _gap(self, start: int, stop: int) -> None:
        log.error(
            "route %s: offsets %d to %d of topic %s aged out before they were exported",
            self._route,
            start,
            stop - 1,
            self._name,
        )
        self._queue.fast.refuse(stop - start, SOURCE_GAP)
        self._dropped(stop - start, "source_gap")


async def push_patiently(route: str, queue: SendQueue, blocks: list[Block], clock: Clock) -> None:
    """Push all blocks, however long the queue or the disk is full."""
    while blocks:
        most = max(1, queue.settings.max_size // 4)
        part: list[Block] = []
        size = 0
        for block in blocks[:most]:
            size += block.size
            if part and size > queue.sizes.max_bytes // 4:
                break
            part.append(block)
        try:
            await queue.push(part, wait=queue.settings.full_behavior == "block")
        except (StorageFull, StorageFailed, Full) as error:
            log.warning("route %s: cannot queue, trying again: %s", route, error)
            await clock.sleep(RETRY)
        except TooLarge as error:
            log.error("route %s: a batch is larger than the whole send queue and is dropped: %s", route, error)
            queue.refuse(part)
            blocks = blocks[len(part) :]
        else:
            blocks = blocks[len(part) :]


class QueueSource:
    def __init__(
        self,
        route: str,
        queues: QueuePort,
        name: str,
        group: str,
        batch: Batching,
        encoding: int,
        queue: SendQueue,
        pool: Executor,
        clock: Clock,
    ) -> None:
        self._route, self._queues, self._name, self._group = route, queues, name, group
        self._batch, self._encoding, self._queue, self._pool, self._clock = batch, encoding, queue, pool, clock
        self.problem: str | None = None

    def lag(self) -> int | None:
        return None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                if self._queue.settings.full_behavior == "block":  # a lease must not run out while a push waits
                    await self._queue.room(min(self._batch.bytes, self._queue.sizes.max_bytes // 4))
                popped = await self._queues.pop(self._name, self._group, self._batch.records, POLL)
                self.problem = None
                if not popped.payloads:
                    continue
                blocks = await loop.run_in_executor(
                    self._pool, make_blocks, popped.payloads, self._encoding, self._batch
                )
                await push_patiently(self._route, self._queue, blocks, self._clock)
                await self._queues.ack(popped)
            except PenstockError as error:
                if self.problem != str(error):
                    log.warning("route %s: queue %s cannot be read, trying again: %s", self._route, self._name, error)
                self.problem = str(error)
                await self._clock.sleep(RETRY)
