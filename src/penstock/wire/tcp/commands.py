"""Execute the commands of the binary protocol: decode the body, call topics or groups, encode the
answer.

A command returns its answer as pieces of bytes. If it must wait, it returns an awaitable of them,
and the connection runs no later request until then. Appends return None, since they have added a
slot for their answer to the connection.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import numpy as np

from penstock.errors import InvalidRequest, PenstockError, TooLarge
from penstock.log.producers import Producer
from penstock.metrics import Metrics
from penstock.monitor.audit import Record
from penstock.protocol import frames
from penstock.protocol.frames import (
    ANSWER,
    CONSUME_REQUEST,
    FETCH_ANSWER,
    FETCH_REQUEST,
    FETCHED_ANSWER,
    INFO_ANSWER,
    INFO_MORE,
    INFO_PARTITIONS,
    LEASE_ANSWER,
    LEASE_REQUEST,
    REQUEST,
    TIMESTAMP,
    U16,
    U32,
    U64,
    Body,
    Bytes,
    Command,
)
from penstock.protocol.record_batch import RECORD_HEADER
from penstock.protocol.roles import Role
from penstock.protocol.sink_claims import Claim, Commit
from penstock.protocol.status import NOT_JSON, Malformed, TcpStatus, UnknownCommand
from penstock.topics.groups import Groups
from penstock.topics.shared.groups import OffsetRange
from penstock.topics.shared.log import SharedLog
from penstock.topics.store import AnyLog, TopicStore
from penstock.topics.topic import Appended, Batch, FetchedBatches, Promise, Raw
from penstock.wire.auth import Verifier
from penstock.wire.framed import Pieces, Slot
from penstock.wire.tcp.auth import MAX_FIRST_FRAME, TcpTokenGuard
from penstock.wire.tcp.connection import Answer, TcpConnection, failure

T = TypeVar("T")
Handler = Callable[[TcpConnection, Body], Answer]

CONSUME_BYTES = 16 << 20  # limit of a CONSUME answer, which has at least one record
# Limit of a FETCH answer. It is read from the page cache on the event loop, so it must be small.
FETCH_BYTES = 1 << 20
FETCH_FLAGS = frames.LENGTHS | frames.TIMES | frames.FORMAT
MAX_FETCHED_RECORDS = 1 << 16  # if record batches are requested as a raw log
MAX_WAIT = 60.0  # seconds a request may wait for records
# Least number of equally long PRODUCEs to append as a table: 32 take 15 % less CPU than in a list.
MIN_TABLE = 24
EMPTY = bytes(16)


class ProduceSlot(Slot):
    """The answers to the PRODUCEs of one append. The commit fills it directly, without a future,
    whose callback would need another tick of the loop.
    """

    __slots__ = ("connection", "count")

    def __init__(self, connection: TcpConnection, count: int, weight: int) -> None:
        self.data = None  # as `Slot.__init__` does, without the cost of that call for each append
        self.weight = weight
        self.connection = connection
        self.count = count

    def done(self) -> bool:
        return self.data is not None

    def set_result(self, appended: Appended) -> None:
        self.connection.fill(self, frames.produced(appended.first_offset, self.count))

    def set_exception(self, error: PenstockError) -> None:
        self.connection.fill(self, failure(error, produce=True) * self.count)


class BatchSlot(ProduceSlot):
    """The answer to a PRODUCE_BATCH or a PRODUCE_RECORDS."""

    __slots__ = ("command",)

    def __init__(self, connection: TcpConnection, command: Command, weight: int) -> None:
        super().__init__(connection, 1, weight)
        self.command = command

    def set_result(self, appended: Appended) -> None:
        self.connection.fill(self, self.encode(appended))

    def encode(self, appended: Appended) -> bytes:
        packed = frames.BATCH_ANSWER.pack(appended.first_offset, appended.count)
        return frames.answer(self.command, packed)


class Commands:
    """A method per command of `Command`, with its name."""

    def __init__(
        self,
        topics: TopicStore,
        groups: Groups,
        metrics: Metrics,
        max_frame: int,
        verifier: Verifier | None = None,
    ) -> None:
        """Create the commands. With a `verifier`, connections must begin with AUTH."""
        self.max_frame = max_frame
        self.record: Record | None = None  # writes changes to the audit log
        self._topics = topics
        self._groups = groups
        self._guard = TcpTokenGuard(verifier, max_frame) if verifier is not None else None
        # the largest frame of a connection without a token
        self.first_frame = min(MAX_FIRST_FRAME, max_frame) if self._guard else max_frame
        self._handlers: dict[int, tuple[Command, Handler]] = {
            command: (command, getattr(self, command.name.lower()))
            for command in Command
            if command is not Command.PRODUCE  # several at a time, straight from the connection
        }
        requests = metrics.counter(
            "penstock_tcp_requests_total", "Requests over TCP, by command", "command"
        )
        self._count = requests.add

    def run(self, connection: TcpConnection, command: int, body: memoryview) -> Answer:
        entry = self._handlers.get(command)
        if self._guard is not None and command != Command.AUTH:
            self._guard.check(connection, entry[0].role if entry else Role.READ_WRITE)
        if entry is None:
            raise UnknownCommand(f"unknown command {command:#04x}")
        self._count(1, entry[0].name.lower())
        return entry[1](connection, Body(body))

    # Appends

    def produce(self, connection: TcpConnection, data: bytes | bytearray, at: int, end: int) -> int:
        """Append the PRODUCE at `at`, and those to the same topic that follow it, as one batch.
        Return where they end.
        """
        stop: int = at + REQUEST.size + REQUEST.unpack_from(data, at)[1]
        try:
            if self._guard is not None:
                self._guard.check(connection, Command.PRODUCE.role)
            name, head = _produce_head(data, at, stop)
            topic = self._topics.get(name)
            if topic is None:
                self._count(1, "produce")
                payload = bytes(data[at + head : stop])
                self._create_and_append(
                    connection,
                    name,
                    lambda created, promise: created.appends.enqueue([payload], promise),
                    lambda appended: frames.produced(appended.first_offset, 1),
                )
                return stop
        except Exception as error:  # noqa: BLE001 - answered; the connection stays usable
            self._count(1, "produce")
            connection.answer(failure(error))
            return stop
        size = stop - at
        if stop == end:  # no other request follows
            slot = ProduceSlot(connection, 1, size)
            self._append(slot, topic, topic.appends.enqueue, [data[at + head : stop]])
            return stop
        if (end - at) // size >= MIN_TABLE and size > head:
            count = _count_alike(data, at, (end - at) // size, size, head)
            if count >= MIN_TABLE:
                table = np.ndarray(count, f"V{size - head}", data, at + head, (size,))
                slot = ProduceSlot(connection, count, count * size)
                self._append(slot, topic, topic.appends.enqueue_table, table)
                return at + count * size
        return self._produce_few(connection, topic, data, at, end, head)

    def _produce_few(
        self,
        connection: TcpConnection,
        topic: AnyLog,
        data: bytes | bytearray,
        at: int,
        end: int,
        head: int,
    ) -> int:
        """Append PRODUCEs of different lengths. The one at `at` is valid, and its payload begins
        after `head` bytes.
        """
        start, batch = at, list[Bytes]()
        name = data[at + REQUEST.size : at + head - U32.size]
        unpack_request, unpack_length = REQUEST.unpack_from, U32.unpack_from
        while end - at >= REQUEST.size:
            command, size = unpack_request(data, at)
            first, stop = at + head, at + REQUEST.size + size
            if (
                not first <= stop <= end
                or command != Command.PRODUCE
                or not data.startswith(name, at + REQUEST.size)
                or unpack_length(data, first - U32.size)[0] != stop - first
            ):
                break  # the next round answers a malformed request
            batch.append(data[first:stop])
            alike, size = data[at:first], stop - at
            at = stop
            while at + size <= end and data.startswith(alike, at):  # one of the same shape
                batch.append(data[at + head : at + size])
                at += size
        slot = ProduceSlot(connection, len(batch), at - start)
        self._append(slot, topic, topic.appends.enqueue, batch)
        return at

    def _append(
        self,
        slot: "ProduceSlot",
        topic: AnyLog,
        enqueue: Callable[[T, Promise], None],
        payloads: T,
    ) -> None:
        """Append the payloads of some PRODUCEs, or answer with the error."""
        connection = slot.connection
        try:
            enqueue(payloads, slot)
        except PenstockError as error:
            if isinstance(error, TooLarge) and isinstance(payloads, list) and slot.count > 1:
                for payload in payloads:  # one of them is too large; append the others
                    one = ProduceSlot(connection, 1, len(payload) + 1)
                    self._append(one, topic, topic.appends.enqueue, [payload])
                return
            connection.answer(failure(error, produce=True) * slot.count)
        else:
            connection.append(slot, topic)
        self._count(slot.count, "produce")

    def produce_batch(self, connection: TcpConnection, body: Body) -> None:
        request = frames.read_batch(body.view)
        lengths, payloads = request.lengths, request.payloads
        producer = Producer(*request.producer) if request.producer is not None else None
        self._append_batch(
            BatchSlot(connection, Command.PRODUCE_BATCH, len(body.view)),
            request.topic,
            len(lengths),
            lambda topic, slot: topic.appends.enqueue_arrays(lengths, payloads, slot, producer),
        )

    def produce_records(self, connection: TcpConnection, body: Body) -> None:
        request = frames.read_records(body.view)
        records = request.records
        producer = Producer(*request.producer) if request.producer is not None else None
        self._append_batch(
            BatchSlot(connection, Command.PRODUCE_RECORDS, len(body.view)),
            request.topic,
            len(records),
            lambda topic, slot: topic.appends.enqueue_records(records, slot, producer),
        )

    def _append_batch(
        self,
        slot: "BatchSlot",
        name: str,
        count: int,
        enqueue: Callable[[AnyLog, Promise], None],
    ) -> None:
        """Append a batch with `enqueue`. Create the topic first if it does not exist."""
        if not count:
            raise InvalidRequest("a batch has at least one record")
        topic = self._topics.get(name)
        if topic is None:
            self._create_and_append(slot.connection, name, enqueue, slot.encode)
            return
        enqueue(topic, slot)
        slot.connection.append(slot, topic)

    def _create_and_append(
        self,
        connection: TcpConnection,
        name: str,
        enqueue: Callable[[AnyLog, Promise], None],
        encode: Callable[[Appended], Bytes],
    ) -> None:
        """Create the topic of its first record, and append. Later requests wait for it."""

        async def work() -> Pieces:
            topic = await self._topics.create(name)
            appended: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
            enqueue(topic, appended)
            topic.appends.schedule()
            return [encode(await appended)]

        connection.hold_for(work(), connection.promise(Slot(1)))

    def auth(self, connection: TcpConnection, body: Body) -> Pieces | Awaitable[Pieces]:
        """Answer AUTH. If authentication is off, any token is accepted, as over HTTP."""
        token = bytes(body.rest())
        return (
            self._guard.admit(connection, token) if self._guard else [frames.answer(Command.AUTH)]
        )

    # Reads

    def consume(self, _: TcpConnection, body: Body) -> Pieces | Awaitable[Pieces]:
        topic = self._topics.find(body.name())
        start, most = body.take(CONSUME_REQUEST)
        body.end()
        if topic is None or most == 0 or start >= topic.next_offset:
            return [frames.consumed([], [])]
        return topic.read_or_wait(lambda: _consumed(topic, start, most))

    def fetch(self, _: TcpConnection, body: Body) -> Pieces | Awaitable[Pieces]:
        topic = self._topics.require(body.name())
        start, most, wait_ms = body.take(FETCH_REQUEST)
        flags = body.rest()
        if len(flags) > 1 or (flags and flags[0] & ~FETCH_FLAGS):
            raise Malformed(f"{frames.UNKNOWN_FLAGS} {bytes(flags).hex()} in FETCH")
        extras = flags[0] if flags else 0
        if start < topic.next_offset or not wait_ms:
            return topic.read_or_wait(lambda: _fetched(topic, start, most, extras))
        return self._wait_and_fetch(topic, start, most, extras, min(wait_ms / 1000, MAX_WAIT))

    async def _wait_and_fetch(
        self, topic: AnyLog, start: int, most: int, extras: int, wait: float
    ) -> Pieces:
        await topic.wait_for(start, wait)
        return await topic.read_through(lambda: _fetched(topic, start, most, extras))

    async def next_offset(self, _: TcpConnection, body: Body) -> Pieces:
        topic = self._topics.find(body.name())
        body.end()
        if isinstance(topic, SharedLog):
            await topic.refresh_if_possible()
        packed = U64.pack(topic.next_offset if topic is not None else 0)
        return [frames.answer(Command.NEXT_OFFSET, packed)]

    def offset_at(self, _: TcpConnection, body: Body) -> Pieces | Awaitable[Pieces]:
        topic = self._topics.require(body.name())
        (milliseconds,) = body.take(TIMESTAMP)
        body.end()

        def search() -> Pieces:
            offset = topic.offset_at(milliseconds / 1000)
            return [frames.answer(Command.OFFSET_AT, U64.pack(offset))]

        return topic.read_or_wait(search)

    async def topic_info(self, _: TcpConnection, body: Body) -> Pieces:
        topic = self._topics.require(body.name())
        body.end()
        if isinstance(topic, SharedLog):
            await topic.refresh_if_possible()
        fixed = INFO_ANSWER.pack(
            bytes.fromhex(topic.incarnation),
            topic.first_offset,
            topic.next_offset,
            topic.size_bytes,
            len(topic.segments),
        )
        archived = frames.NO_OFFSET if topic.archived_offset is None else topic.archived_offset
        more = INFO_MORE.pack(topic.records, archived, frames.POLICIES.index(topic.policy))
        more += U32.pack(len(topic.damage)) + INFO_PARTITIONS.pack(
            self._topics.partitions(topic.topic), frames.FORMATS.index(topic.format.name)
        )
        return [frames.answer(Command.TOPIC_INFO, fixed + more)]

    # Topics

    def list_topics(self, _: TcpConnection, body: Body) -> Pieces:
        body.end()
        return [frames.names(self._topics.names())]

    async def create_topic(self, connection: TcpConnection, body: Body) -> Pieces:
        name = body.name()
        body.end()
        await self._topics.create(name)
        await self._changed(connection, "topic.create", name)
        return [frames.answer(Command.CREATE_TOPIC)]

    async def create_partitioned(self, connection: TcpConnection, body: Body) -> Pieces:
        name, form = body.name(), body.name("format")
        (partitions,) = body.take(U32)
        body.end()
        await self._topics.create(name, form=form or None, partitions=partitions)
        await self._changed(connection, "topic.create", name)
        return [frames.answer(Command.CREATE_PARTITIONED)]

    async def delete_topic(self, connection: TcpConnection, body: Body) -> Pieces:
        name = body.name()
        body.end()
        await self._topics.delete(name)
        await self._changed(connection, "topic.delete", name)
        return [frames.answer(Command.DELETE_TOPIC)]

    async def _changed(self, connection: TcpConnection, action: str, topic: str) -> None:
        if self.record is not None:
            await self.record(connection.who, action, topic, {"over": "TCP"})

    # Groups

    async def group_lease(self, _: TcpConnection, body: Body) -> Pieces:
        topic = self._topics.require(body.name())
        group, member = body.name("group"), body.name("member")
        most, wait_ms = body.take(LEASE_REQUEST)
        body.end()
        seconds = min(wait_ms / 1000, MAX_WAIT)
        lease = await self._groups.lease_within(seconds, group, topic.name, member, most)
        if lease is None:
            packed = LEASE_ANSWER.pack(EMPTY, 0, 0, 0)
        else:
            lease_id, remaining = bytes.fromhex(lease.lease_id), _remaining_ms(lease)
            packed = LEASE_ANSWER.pack(lease_id, lease.start, lease.end, remaining)
        return [frames.answer(Command.GROUP_LEASE, packed)]

    async def group_complete(self, _: TcpConnection, body: Body) -> Pieces:
        topic, lease_id = self._lease_id(body)
        committed = await self._groups.complete(lease_id, topic)
        return [frames.answer(Command.GROUP_COMPLETE, U64.pack(committed))]

    async def group_renew(self, _: TcpConnection, body: Body) -> Pieces:
        lease = await self._groups.renew_on(*self._lease_id(body))
        return [frames.answer(Command.GROUP_RENEW, U32.pack(_remaining_ms(lease)))]

    def _lease_id(self, body: Body) -> tuple[str, str]:
        """Return the topic and the id of the lease."""
        topic = self._topics.require(body.name())
        body.name("group")
        lease_id = body.bytes(16, "lease").hex()
        body.end()
        return topic.name, lease_id

    async def group_commit(self, _: TcpConnection, body: Body) -> Pieces:
        topic, group = self._topics.require(body.name()), body.name("group")
        (offset,) = body.take(U64)
        body.end()
        await self._groups.commit(group, topic.name, offset)
        return [frames.answer(Command.GROUP_COMMIT)]

    async def group_fetch(self, _: TcpConnection, body: Body) -> Pieces:
        topic, group = self._topics.require(body.name()), body.name("group")
        body.end()
        committed, lag = await self._groups.resume(group, topic.name)
        position = topic.first_offset if committed is None else committed
        packed = FETCHED_ANSWER.pack(position, lag)
        return [frames.answer(Command.GROUP_FETCH, packed)]

    async def group_leave(self, _: TcpConnection, body: Body) -> Pieces:
        topic = self._topics.require(body.name())
        group, member = body.name("group"), body.name("member")
        body.end()
        packed = U32.pack(await self._groups.leave_on(group, topic.name, member))
        return [frames.answer(Command.GROUP_LEAVE, packed)]

    # Exactly-once sinks

    async def sink_claim(self, _: TcpConnection, body: Body) -> Pieces:
        claimed = await self._groups.write_claims.claim(_json(body, Claim))
        return [frames.answer(Command.SINK_CLAIM, msgspec.json.encode(claimed))]

    async def sink_commit(self, _: TcpConnection, body: Body) -> Pieces:
        await self._groups.write_claims.commit(_json(body, Commit))
        return [frames.answer(Command.SINK_COMMIT)]


def _json(body: Body, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body.rest(), type=kind)
    except NOT_JSON as error:
        raise Malformed(str(error)) from None


def _remaining_ms(lease: OffsetRange) -> int:
    return max(0, round((lease.expires - time.monotonic()) * 1000))


def _produce_head(data: bytes | bytearray, at: int, stop: int) -> tuple[str, int]:
    """Return the topic of the PRODUCE at `at`, and the number of bytes before its payload."""
    if stop - at < 11:
        raise Malformed("a PRODUCE body has at least 6 bytes")
    topic_end: int = at + 7 + U16.unpack_from(data, at + 5)[0]
    if topic_end + 4 > stop:
        raise Malformed("the topic name runs past the body")
    (length,) = U32.unpack_from(data, topic_end)
    if topic_end + 4 + length != stop:
        raise Malformed(
            f"the payload has {stop - topic_end - 4} bytes, but its length field says {length}"
        )
    try:
        return data[at + 7 : topic_end].decode(), topic_end + 4 - at
    except UnicodeDecodeError:
        raise InvalidRequest("the topic name is not valid UTF-8") from None


def _count_alike(data: bytes | bytearray, at: int, most: int, size: int, head: int) -> int:
    """Count the requests from `at` on, up to `most`, that have the size and the head of the first.
    All heads are compared at once.
    """
    heads = np.ndarray((most, head), np.uint8, data, at, (size, 1))
    same = heads == heads[0]
    return most if same.all() else int(same.all(axis=1).argmin())


def _consumed(topic: AnyLog, start: int, most: int) -> Pieces:
    batch = topic.read(start, most, CONSUME_BYTES)
    if not batch.count:
        return [frames.consumed([], [])]
    return [frames.consumed_log(batch.buffer, batch.offsets, batch.starts, batch.ends)]


def _fetched(topic: AnyLog, start: int, most: int, extras: int) -> Pieces:
    most, columns = min(most, FETCH_BYTES), b""
    if topic.format.keyed and extras & frames.FORMAT:
        fetched = topic.batches(start, most)
        return _fetch_answer(topic, fetched, bytes([frames.RECORD_BATCHES]), fetched.data)
    records: Batch | Raw
    if topic.format.keyed or isinstance(topic, SharedLog):
        records = batch = topic.read(start, MAX_FETCHED_RECORDS, most, strict=True)
        raw = b"".join(
            part
            for offset, payload in batch
            for part in (RECORD_HEADER.pack(offset, len(payload)), payload)
        )
    else:
        records = topic.raw(start, most, strict=True)
        raw = records.read()
    if extras & frames.FORMAT:
        columns = bytes([frames.RAW_LOG])
    if extras & frames.LENGTHS:
        columns += records.lengths.astype(">u4").tobytes()
    if extras & frames.TIMES:
        columns += frames.times(topic.timestamps(records.offsets))
    return _fetch_answer(topic, records, columns, raw)


def _fetch_answer(
    topic: AnyLog, records: Batch | FetchedBatches | Raw, columns: bytes, raw: bytes
) -> Pieces:
    size = FETCH_ANSWER.size + len(columns) + len(raw)
    head = ANSWER.pack(Command.FETCH | frames.REPLY, TcpStatus.SUCCESS, size)
    fixed = FETCH_ANSWER.pack(
        bytes.fromhex(topic.incarnation),
        records.first_offset,
        records.next_offset,
        topic.next_offset,
        records.count,
    )
    return [head + fixed, columns, raw]
