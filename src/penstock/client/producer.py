"""A producer that gathers records into batches, keeps their order, and sends each batch until it is
answered.

`send` adds to the open batch and returns at once; it waits only while the buffer is full, so a slow
broker slows its producers down. A batch is closed when it is large enough, when `linger` has passed
since its first record, or by `flush`. One task sends closed batches in order, several in flight on
one connection.

Every batch carries the producer's id and a sequence number. After a lost connection or a failure
that may pass, all unanswered batches are sent again from the oldest on, with the same numbers: the
broker answers those it already has with their first answer, stores the others, and refuses one that
comes before its turn, so each record is stored once and in the order it was sent.

A batch that is refused for good (too large) fails alone, and the ones behind it go on under a new
id, since the broker waits in vain for the missing number under the old one. When the oldest batch
has got no answer within `timeout`, what became of it and of those sent behind it is unknown: all of
them fail. Whoever awaits one of their records gets the error, and `flush` and `close` raise it, so
it cannot be lost in silence. What a producer waits for meanwhile (no broker, a full disk) is logged
once.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Generator, Iterable
from typing import Self, TypedDict, Unpack

from penstock.client.connection import Connection, Link, Waiting
from penstock.client.items import check_names
from penstock.client.reader import ask
from penstock.client.records import (
    BatchNumbers,
    Outgoing,
    RecordFields,
    outgoing,
    produce_frame,
    size_of,
)
from penstock.errors import (
    ConnectionLost,
    InvalidRequest,
    NotFound,
    PenstockError,
    TooLarge,
    Unavailable,
)
from penstock.net.retry import Backoff
from penstock.protocol import frames
from penstock.protocol.frames import BATCH_ANSWER, MAX_FRAME, Body, Bytes, Command
from penstock.protocol.names import partition_label
from penstock.protocol.partitions import Rotation, partition_of
from penstock.protocol.status import MAY_PASS

log = logging.getLogger("penstock.client")

RECORD_OVERHEAD = 64  # approximate memory of a buffered record besides its payload
MAX_RECORDS = 100_000


class _Batch:
    __slots__ = (
        "bytes",
        "deadline",
        "first_offset",
        "partition",
        "records",
        "sent",
        "sequence",
        "timer",
    )

    def __init__(
        self, first_offset: "asyncio.Future[int]", partition: int | None, deadline: float
    ) -> None:
        self.records: list[Outgoing] = []
        self.bytes = 0
        self.partition = partition  # None: chosen when it is sent
        self.sequence: int | None = None  # among the batches of its partition, once it is sent
        self.deadline = deadline
        self.timer: asyncio.TimerHandle | None = None  # of the linger
        self.sent = False  # at least once: the broker may have it
        self.first_offset = first_offset


class Delivery:
    """The pending result of one record: `await` it to wait until the record is stored and to get
    its offset.
    """

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: _Batch, index: int) -> None:
        self._batch, self._index = batch, index

    def __await__(self) -> Generator[object, None, int]:
        first = yield from asyncio.shield(self._batch.first_offset).__await__()
        return first + self._index

    def done(self) -> bool:
        """Return whether the record is stored or has failed."""
        return self._batch.first_offset.done()


class ProducerOptions(TypedDict, total=False):
    """The options of `Topic.producer`."""

    linger: float  # seconds to wait for a batch to fill; default 0.005
    max_batch_bytes: int  # default 1 MiB
    max_batch_records: int  # default 10,000
    buffer_bytes: int  # when so many bytes are unanswered, send waits; default 64 MiB
    in_flight: int  # batches sent and not answered yet; default 4
    timeout: float  # seconds to retry a batch before it fails; default 120
    idempotent: bool  # store each record once and in order; default True


class Producer:
    """Sends records in batches. Create it with `Topic.producer`. Use it in `async with`, or call
    `close`, so that the last batch is sent.
    """

    def __init__(self, link: Link, topic: str, **options: Unpack[ProducerOptions]) -> None:
        check_names(options, ProducerOptions)
        self._linger, self._timeout = options.get("linger", 0.005), options.get("timeout", 120.0)
        self._max_bytes = options.get("max_batch_bytes", 1 << 20)
        self._max_records = options.get("max_batch_records", 10_000)
        self._buffer_bytes = options.get("buffer_bytes", 64 << 20)
        self._in_flight = options.get("in_flight", 4)
        self._idempotent = options.get("idempotent", True)
        if (
            not 1 <= self._max_records <= MAX_RECORDS
            or not 1 <= self._max_bytes <= MAX_FRAME // 2
            or self._in_flight < 1
        ):
            raise InvalidRequest(
                f"a batch has 1 to {MAX_RECORDS} records and 1 to {MAX_FRAME // 2} bytes, "
                "with 1 or more in flight"
            )
        self.topic = topic
        self.records = 0  # stored so far, and the offsets of the first and the last one
        self.first_offset: int | None = None
        self.last_offset: int | None = None
        self._numbers: dict[int, BatchNumbers] = {}  # by partition
        self._partitions: int | None = None  # of the topic, once a broker answered
        self._rotation = Rotation()
        self._link = link
        self._loop = asyncio.get_running_loop()
        # by partition; None: of records that name neither a partition nor a key
        self._open: dict[int | None, _Batch] = {}
        # closed and unanswered, oldest first; the first ones are in flight
        self._queue: deque[_Batch] = deque()
        self._buffered = 0  # bytes in `_open` and `_queue`
        self._changed = asyncio.Event()  # a batch was closed, or we are closing
        self._room: deque[asyncio.Future[None]] = deque()
        self._failure: PenstockError | None = None  # the first one not yet raised by flush or close
        self._closing = False
        self._waiting = Waiting(f"the producer of {topic}")
        self._sender = self._loop.create_task(self._run(), name=f"producer of {topic}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def send(self, payload: Bytes | None, **fields: Unpack[RecordFields]) -> Delivery:
        """Add one record. Waits only while the buffer is full, and for the first key until a broker
        has answered how many partitions there are. Await the returned delivery to get the offset.
        Records of one partition keep their order.
        """
        if self._buffered >= self._buffer_bytes or self._room:
            await self._wait_for_room()
        key, partition = fields.get("key"), fields.get("partition")
        if key is not None and partition is None:
            partition = partition_of(key, self._partitions or await self._learn())
        return self._add(outgoing(payload, fields), partition)

    async def send_many(self, payloads: Iterable[Bytes]) -> Delivery | None:
        """Add several records, in order. Returns the delivery of the last one, or None if there
        were none. Without keys they go to the partitions in turn, a batch each.
        """
        delivery = None
        for payload in payloads:
            if self._buffered >= self._buffer_bytes or self._room:
                await self._wait_for_room()
            delivery = self._add(payload, None)
        return delivery

    async def _learn(self) -> int:
        """Ask how many partitions the topic has."""
        try:
            body = await ask(self._link, _about(self.topic), self._timeout)
            self._partitions = frames.read_info(body).partitions
        except NotFound:  # the first record creates it
            self._partitions = 1
        return self._partitions

    async def flush(self) -> None:
        """Send all buffered records and wait until they are answered. Raises the first failure
        since the last flush.
        """
        self._close_batches()
        pending = [batch.first_offset for batch in self._queue]
        if pending:
            await asyncio.wait(pending)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @property
    def failure(self) -> PenstockError | None:
        """The first failure that neither `flush` nor `close` has raised yet."""
        return self._failure

    def abort(self) -> None:
        """Stop at once. Records without an answer fail; the broker may have stored them."""
        self._closing = True
        self._close_batches()
        self._sender.cancel()
        self._fail_all(Unavailable("the producer was stopped before this record was answered"))

    async def close(self) -> None:
        """Flush, then stop. It is safe to call it twice."""
        try:
            await self.flush()
        finally:
            self._closing = True
            self._changed.set()
            if not self._queue:
                await asyncio.wait([self._sender])
            else:  # interrupted (cancelled) while batches were unanswered
                self._sender.cancel()
                self._fail_all(
                    Unavailable("the producer was closed before this record was answered")
                )

    # Batches

    def _add(self, record: Outgoing, partition: int | None) -> Delivery:
        if self._closing:
            raise InvalidRequest("the producer is closed")
        size = size_of(record)
        if size > MAX_FRAME - 1024:
            raise TooLarge(
                f"a payload of {size} bytes is larger than one frame may be ({MAX_FRAME} bytes)"
            )
        batch = self._open.get(partition)
        if batch is not None and batch.bytes + size > self._max_bytes:
            self._close_batch(batch)
            batch = None
        if batch is None:
            deadline = self._loop.time() + self._timeout
            batch = _Batch(self._loop.create_future(), partition, deadline)
            self._open[partition] = batch
            if self._linger:
                batch.timer = self._loop.call_later(self._linger, self._close_batch, batch)
        batch.records.append(record)
        batch.bytes += size
        self._buffered += size + RECORD_OVERHEAD
        delivery = Delivery(batch, len(batch.records) - 1)
        if len(batch.records) >= self._max_records or batch.bytes >= self._max_bytes:
            self._close_batch(batch)
        elif not self._linger:
            # without linger the sender takes the batch as soon as it gets to run
            self._changed.set()
        return delivery

    def _close_batch(self, batch: _Batch) -> None:
        del self._open[batch.partition]
        if batch.timer is not None:
            batch.timer.cancel()
        self._queue.append(batch)
        self._changed.set()

    def _close_batches(self) -> None:
        for batch in list(self._open.values()):
            self._close_batch(batch)

    async def _wait_for_room(self) -> None:
        while self._buffered >= self._buffer_bytes:
            self._close_batches()  # no record can join the batch: do not linger
            waiter = self._loop.create_future()
            self._room.append(waiter)
            await waiter

    def _remove_oldest(self, batch: _Batch) -> None:
        """Take a batch that was answered or has failed out of the buffer."""
        self._queue.popleft()
        self._buffered -= batch.bytes + RECORD_OVERHEAD * len(batch.records)
        while self._room and self._buffered < self._buffer_bytes:
            waiter = self._room.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break

    def _stored(self, first: int, count: int) -> None:
        self._waiting.over()
        self.records += count
        if self.first_offset is None:
            self.first_offset = first
        self.last_offset = first + count - 1

    def _fail(self, batch: _Batch, error: PenstockError) -> None:
        self._remove_oldest(batch)
        if not batch.first_offset.done():
            batch.first_offset.set_exception(error)
            # seen: `flush` raises it, so a delivery that is not awaited is not lost
            batch.first_offset.exception()
        self._failure = self._failure or error

    def _fail_all(self, error: PenstockError) -> None:
        while self._queue:
            self._fail(self._queue[0], error)
        self._renew_ids()

    def _renew_ids(self) -> None:
        for numbers in self._numbers.values():
            numbers.renew_id()

    # Sending

    async def _run(self) -> None:
        backoff = Backoff()
        while not (self._closing and not self._queue):
            if not self._queue:
                if not self._linger and self._open:
                    self._close_batches()
                    continue
                self._changed.clear()
                if not self._closing:
                    await self._changed.wait()
                continue
            oldest = self._queue[0]
            try:
                connection = await self._link.connection(oldest.deadline, self._waiting)
                if self._partitions is None and oldest.partition is None:
                    await self._learn()
                await self._pump(connection)
                backoff.reset()
            except MAY_PASS as error:
                # Nothing unanswered is taken out of the queue: the next round sends it again,
                # oldest first.
                unknown = not self._idempotent and isinstance(error, ConnectionLost)
                if unknown or self._loop.time() >= oldest.deadline:
                    self._give_up(error)
                else:
                    self._waiting.note(error, oldest.deadline - self._loop.time())
                    await asyncio.sleep(
                        min(backoff.delay(), max(0.0, oldest.deadline - self._loop.time()))
                    )
            except PenstockError as error:  # the broker rejects the token: waiting does not help
                self._fail_all(error)
            except Exception as error:  # a bug must not stop the sender for good
                log.exception("producer of %s: sending failed", self.topic)
                self._fail_all(PenstockError(f"sending failed: {error!r}"))

    def _give_up(self, error: PenstockError) -> None:
        """Fail the oldest batch, and the later ones that the broker may have stored."""
        self._fail(self._queue[0], error)
        while self._queue and self._queue[0].sent:
            self._fail(self._queue[0], error)
        self._renew_ids()

    def _frame(self, batch: _Batch) -> list[Bytes]:
        if batch.partition is None:
            batch.partition = self._rotation.next(self._partitions or 1)
        numbers = self._numbers.setdefault(batch.partition, BatchNumbers())
        if batch.sequence is None:
            batch.sequence = numbers.take()
        producer = (numbers.id, batch.sequence) if self._idempotent else None
        return produce_frame(partition_label(self.topic, batch.partition), batch.records, producer)

    async def _pump(self, connection: Connection) -> None:
        """Send batches in order and take their answers in order, until the queue is empty or
        something fails.
        """
        answers: deque[asyncio.Future[memoryview]] = deque()
        # a batch failed for good: those sent behind it under the same id are refused, too
        refused = False
        try:
            while self._queue:
                while not refused and len(answers) < min(self._in_flight, len(self._queue)):
                    batch = self._queue[len(answers)]
                    batch.sent = True
                    answers.append(connection.request(self._frame(batch)))
                if not answers:
                    return
                oldest = self._queue[0]
                try:
                    async with asyncio.timeout_at(oldest.deadline):
                        body = await answers[0]
                except TimeoutError:
                    # late answers could be mistaken for those of the next requests
                    connection.close()
                    late = Unavailable(f"no answer from the broker within {self._timeout:g} s")
                    raise self._waiting.error or late from None
                except MAY_PASS:
                    raise
                except PenstockError as error:
                    if refused:
                        return  # sent again under the new id, in its turn
                    answers.popleft()
                    self._fail(oldest, error)
                    if oldest.partition in self._numbers:
                        # Batches of other partitions may be stored under their ids.
                        self._numbers[oldest.partition].renew_id()
                    refused = self._idempotent
                    continue
                answers.popleft()
                first, count = Body(body).take(BATCH_ANSWER)
                self._remove_oldest(oldest)
                self._stored(first, count)
                if not oldest.first_offset.done():
                    oldest.first_offset.set_result(first)
                if not self._linger:
                    self._close_batches()
        finally:
            # What is still in flight will be sent again: its answers are read (the order on the
            # connection must hold) and dropped; the broker knows the batches by their numbers.
            for answer in answers:
                answer.add_done_callback(_drop)
            if answers and (await asyncio.wait(answers, timeout=self._timeout))[1]:
                connection.close()


def _about(topic: str) -> bytes:
    return frames.request(Command.TOPIC_INFO, frames.name(topic))


def _drop(answer: "asyncio.Future[memoryview]") -> None:
    if not answer.cancelled():
        answer.exception()
