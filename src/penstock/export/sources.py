"""Fill the send queue of a route from its source: a topic or a queue.

A topic is read by offset. Each block has the position after it in the source, so the content of the
queue and the position in the source always agree: after a kill, the reader resumes exactly after
the last block on disk. A topic that was deleted and recreated is read from 0: the upper 16 bits of
a position count incarnations. A topic that does not exist is not created; the reader waits for it.

A damaged place in a topic is read twice, `RETRY_SECONDS` apart, and then skipped: the reader
resumes at the next readable offset, and the skipped records count as dropped{reason="damaged"}.
Records that retention deletes before they are read count as dropped{reason="source_gap"}. Both are
booked together with the position after them, so a kill counts nothing twice.

A queue is read through a consumer group: pop, put into the send queue with the durability of the
route, then ack. After a crash in between, the messages are leased again and may be delivered twice.
A pop waits until there is room for some messages. While the others wait for room, their lease is
renewed, so it does not expire during an outage of the destination or the disk. Leases are taken
under the route's own number (`holder`). Between two pops a route has no lease. So any lease of that
number belongs to a killed process or a lost answer. It is released at the start and after each
error, so that other consumers need not wait until it expires.

Otherwise a reader drops nothing: while the send queue or the disk is full, it waits.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from functools import partial
from itertools import pairwise, repeat
from typing import Any

from penstock.errors import (
    Damaged,
    InvalidRequest,
    NotFound,
    PenstockError,
    StorageError,
    TooLarge,
    Unavailable,
)
from penstock.export.context import Clock, RouteContext
from penstock.export.envelope import with_headers, wrap, wrap_payload, wrap_record
from penstock.export.payload import RAW, join
from penstock.export.routestate import RouteState
from penstock.export.sendqueue import DAMAGED, NEWEST, SOURCE_GAP, Block, SendQueue, records_of
from penstock.export.spec import Batching, RouteSpec
from penstock.io.tasks import RETRY_SECONDS, supervised
from penstock.protocol.names import partition_label
from penstock.queues.engine import Queues
from penstock.queues.types import Ack, Delivered, PopRequest
from penstock.topics.store import AnyLog, TopicStore

log = logging.getLogger("penstock.export")
MAX_READ_BATCHES = 8  # read and pushed together if the route lags behind
POLL_SECONDS = 30.0
LINGER_SECONDS = 5.0  # a pop of a killed process has ended in the database after this time
RELEASE_POPS = 2  # dead leases are released before the first pop, and after LINGER_SECONDS
RELEASE_TIMEOUT_SECONDS = 2.0
RENEW_AFTER_SECONDS = 1.0  # duration of a push after which its leases are renewed
RENEW_EVERY_SECONDS = 20.0  # until the next renewal
LEASE_SECONDS = 60  # duration of a renewed lease
LAG_SECONDS = 15.0  # between two queries of a queue's lag
GENERATION_BITS = 48
OFFSET_MASK = (1 << GENERATION_BITS) - 1


def make_blocks(records: list[bytes], encoding: int, batch: Batching) -> list[Block]:
    """Pack the records, in order, into as few blocks as the limits of a batch allow."""
    most = 1 if encoding == RAW else batch.records
    cuts, start, size = [0], 0, 0
    if len(records) > most or sum(map(len, records)) > batch.bytes:
        for at, record in enumerate(records):
            if at > start and (at - start >= most or size + len(record) > batch.bytes):
                cuts.append(at)
                start, size = at, 0
            size += len(record)
    return [
        Block(join(records[start:stop], encoding), stop - start, encoding)
        for start, stop in pairwise([*cuts, len(records)])
        if start < stop
    ]


class SourceReader(ABC):
    """Base class of the sources of a route."""

    def __init__(
        self,
        spec: RouteSpec,
        context: RouteContext,
        queue: SendQueue,
        encoding: int,
        state: RouteState,
    ) -> None:
        self._spec = spec
        self._name = spec.source.name
        self._batch = spec.batch
        self._context = context
        self._queue = queue
        self._encoding = encoding
        self._state = state
        self.problem: str | None = None  # why the source cannot be read; None: it can
        self.damage: str | None = None  # the last damaged place that was skipped

    async def run(self) -> None:
        """Fill the send queue until cancelled."""
        while True:
            try:
                await self._read()
            except PenstockError as error:
                self._report(error)
            await self._context.clock.sleep(RETRY_SECONDS)

    @abstractmethod
    async def _read(self) -> None:
        """Read until an error, and raise it."""

    @abstractmethod
    def lag(self) -> int | None:
        """Return the number of records that are not read yet; None if it is unknown."""

    async def refresh(self) -> None:  # noqa: B027 nothing to do for a topic
        """Query the lag now, if it needs a query."""

    async def watch(self) -> None:  # noqa: B027 nor here
        """Refresh the lag periodically until cancelled."""

    def _report(self, error: PenstockError) -> None:
        if self.problem != str(error):
            text = "route %s: %s %s cannot be read, trying again: %s"
            log.warning(text, self._spec.name, self._spec.source.kind, self._name, error)
        self.problem = str(error)


class TopicSource(SourceReader):
    """Read one partition of a topic."""

    _next: int | None = None  # the offset to read
    _start_was_seen = True  # whether the topic existed when the route started
    _damaged_at: int | None = None  # the offset whose read has failed once

    @property
    def _topics(self) -> TopicStore:
        assert self._context.topics is not None  # or the route was refused
        return self._context.topics

    def _find(self) -> AnyLog | None:
        return self._topics.get(partition_label(self._name, self._spec.source.partition or 0))

    def lag(self) -> int | None:
        topic = self._find()
        offset = self._next
        if offset is None and (position := self._queue.books.position) >= 0:
            offset = position & OFFSET_MASK  # before the first read: the end of the queue
        return None if topic is None or offset is None else max(0, topic.next_offset - offset)

    async def _read(self) -> None:
        topic = self._find()
        if topic is None:
            self._start_was_seen = False
            raise NotFound(f"topic {self._name} does not exist")
        partitions = self._topics.partitions(self._name)
        if partitions > 1 and self._spec.source.partition is None:
            raise InvalidRequest(
                f"topic {self._name} has {partitions} partitions: name one with source.partition, "
                "in a route for each"
            )
        self.problem = None
        generation = await self._state.generation_of(topic.incarnation)
        position = self._queue.books.position
        if position >= 0 and position >> GENERATION_BITS == generation:
            offset = position & OFFSET_MASK
        else:
            offset = self._first(topic) if generation == 0 else 0
        self._next = offset
        while True:
            if not await topic.wait_for(offset, POLL_SECONDS):
                if self._find() is not topic:
                    raise NotFound(f"topic {self._name} was deleted")
                continue
            if self._batch.linger and topic.next_offset - offset < self._batch.records:
                await self._context.clock.sleep(self._batch.linger)
            if offset < topic.first_offset:
                why = "aged out before they were exported"
                offset = await self._pass_over(
                    generation, offset, topic.first_offset, SOURCE_GAP, why
                )
            try:
                batches = await topic.read_through(partial(self._read_ahead, topic, offset))
            except Damaged as error:
                stop = await topic.read_through(partial(_end_of_damage, topic, offset))
                if stop == offset or self._damaged_at != offset:
                    self._damaged_at = offset
                    raise  # it is read once more before records are skipped
                why = f"are damaged and were not exported: {error}"
                offset = await self._pass_over(generation, offset, stop, DAMAGED, why)
            else:
                blocks = await self._context.in_pool(self._make, batches, generation)
                await push_patiently(self._queue, blocks, self._context.clock)
                offset = batches[-1].next_offset
            self._next = offset

    def _read_ahead(self, topic: AnyLog, offset: int) -> list[Any]:
        """Return a few batches, up to a damaged place. Raises Damaged if the first read is damaged.
        An empty batch means that the remaining offsets have no records.
        """
        batches: list[Any] = []
        while len(batches) < MAX_READ_BATCHES:
            try:
                batch = topic.read(offset, self._batch.records, self._batch.bytes)
            except Damaged:
                if not batches:
                    raise
                break
            if not batch.count and batches:
                break
            batches.append(batch)
            offset = batch.next_offset
            if topic.next_offset - offset < self._batch.records:
                break
        return batches

    def _make(self, batches: list[Any], generation: int) -> list[Block]:
        blocks = []
        for batch in batches:
            done = 0
            for block in make_blocks(self._records_of(batch), self._encoding, self._batch):
                done += block.records
                following = batch.offsets[done] if done < batch.count else batch.next_offset
                block.position = generation << GENERATION_BITS | int(following)
                blocks.append(block)
        return blocks

    def _records_of(self, batch: Any) -> list[bytes]:
        if not self._spec.target.takes_records:
            payloads: list[bytes] = batch.payloads()
            return payloads
        if batch.keyed:
            return [wrap_record(self._name, record) for record in batch.records()]
        offsets = batch.offsets.tolist()
        return list(map(wrap_payload, repeat(self._name), offsets, batch.payloads()))

    def _first(self, topic: AnyLog) -> int:
        start = self._spec.source.start
        if start == "latest":  # all records of a topic that was created later
            return topic.next_offset if self._start_was_seen else topic.first_offset
        return int(start) if start.isdigit() else topic.first_offset

    async def _pass_over(
        self, generation: int, start: int, stop: int, reason: int, why: str
    ) -> int:
        """Book unreadable offsets as dropped. Return where reading resumes."""
        text = f"offsets {start} to {stop - 1} of topic {self._name} {why}"
        await self._queue.pass_over(stop - start, reason, generation << GENERATION_BITS | stop)
        log.error("route %s: %s", self._spec.name, text)
        if reason == DAMAGED:
            self.damage = text
        return stop


def _end_of_damage(topic: AnyLog, offset: int) -> int:
    """Return the next readable offset after damage at `offset`; `offset` if it is unknown."""
    while offset < topic.next_offset:
        try:
            topic.read(offset, 1, 1)
        except Damaged as error:
            if error.resume is None or error.resume <= offset:
                break
            offset = error.resume
        else:
            break
    return offset


async def push_patiently(queue: SendQueue, blocks: list[Block], clock: Clock) -> None:
    """Push all blocks. Wait without a limit while the queue or the disk is full."""
    while blocks:
        most = max(1, queue.settings.max_size // 4)
        part: list[Block] = []
        size = 0
        for block in blocks[:most]:
            size += block.size
            if part and size > queue.max_bytes // 4:
                break
            part.append(block)
        try:
            await queue.push(part, wait=True)
        except StorageError as error:
            log.warning("route %s: cannot queue, trying again: %s", queue.name, error)
            await clock.sleep(RETRY_SECONDS)
            continue
        except TooLarge as error:
            text = "route %s: a batch is larger than the whole send queue and is dropped: %s"
            log.error(text, queue.name, error)
            queue.refuse(records_of(part), NEWEST, len(part))
        blocks = blocks[len(part) :]


class QueueSource(SourceReader):
    closed = False  # as a consumer of the queue, it has no connection that could close
    _lag: int | None = None  # unacknowledged messages at the last query

    @property
    def _queues(self) -> Queues:
        if self._context.queues is None:
            raise Unavailable("this process has no queues")
        return self._context.queues

    def lag(self) -> int | None:
        return self._lag

    async def refresh(self) -> None:
        try:
            self._lag = await self._queues.groups.lag(self._name, self._spec.source.group)
        except PenstockError:
            self._lag = None  # the group does not exist yet, or the database does not answer

    async def watch(self) -> None:
        while True:
            await self.refresh()
            await self._context.clock.sleep(LAG_SECONDS)

    async def _read(self) -> None:
        releases = RELEASE_POPS
        while True:
            if releases:
                await self._release()
            # A lease must not expire while a push waits.
            if self._queue.settings.full_behavior == "block":
                await self._queue.wait_for_room(min(self._batch.bytes, self._queue.max_bytes // 4))
            request = PopRequest(
                queue=self._name,
                group=self._spec.source.group,
                batch=self._batch.records,
                wait=True,
                timeout=LINGER_SECONDS if releases else POLL_SECONDS,
                holder=self._state.holder,
                consumer=self,
            )
            popped = await self._queues.pop(request)
            releases = max(0, releases - 1)
            self.problem = None
            if popped.messages:
                await self._move(popped.messages)

    async def _release(self) -> None:
        released = await self._queues.release(
            self._name, self._spec.source.group, self._state.holder
        )
        if released:
            text = "route %s: %d unused leases on queue %s are released"
            log.warning(text, self._spec.name, released, self._name)

    async def _move(self, popped: list[Delivered]) -> None:
        """Put messages into the send queue, then acknowledge them."""
        if self._spec.source.envelope:
            records = [wrap(message) for message in popped]
        elif self._spec.target.takes_headers:
            records = [with_headers(message) for message in popped]
        else:
            records = [message.payload for message in popped]
        try:
            blocks = await self._context.in_pool(make_blocks, records, self._encoding, self._batch)
            renewing = supervised(
                f"leases of route {self._spec.name}",
                partial(self._renew, popped),
                self._context.metrics,
            )
            try:
                await push_patiently(self._queue, blocks, self._context.clock)
            finally:
                renewing.cancel()
        except asyncio.CancelledError:  # other consumers of the group need not wait
            try:
                async with asyncio.timeout(RELEASE_TIMEOUT_SECONDS):
                    await self._release()
            except (PenstockError, TimeoutError) as error:
                text = "route %s: a lease on queue %s stays until it expires: %s"
                log.warning(text, self._spec.name, self._name, error)
            raise
        group = self._spec.source.group
        acks = [
            Ack(each.transaction_id, each.partition_id, each.lease_id, group=group)
            for each in popped
        ]
        while True:
            try:
                await self._queues.ack(acks)
            except Unavailable as error:  # without the ack they would be sent twice
                self._report(error)
                await self._context.clock.sleep(RETRY_SECONDS)
            else:
                self.problem = None
                return

    async def _renew(self, popped: list[Delivered]) -> None:
        delay = RENEW_AFTER_SECONDS
        while True:
            await self._context.clock.sleep(delay)
            try:
                for lease in {message.lease_id for message in popped}:
                    await self._queues.extend(lease, LEASE_SECONDS)
                delay = RENEW_EVERY_SECONDS
            except PenstockError as error:
                self._report(error)
                delay = RETRY_SECONDS
