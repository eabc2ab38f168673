"""Topics over the binary protocol: `Client.topic` gives a `Topic`.

The client asks a broker's `/health` for its TCP port, and connects to that port on the host of the
broker's URL. If clients reach another port, such as a mapped port of a container, pass
`topics="tcp://host:port"`.

All topics of a client share one connection, to the first address that answers. After a lost
connection, a request that is safe to repeat is sent again until `timeout`. `produce` is safe: it
carries a producer id.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from datetime import datetime
from typing import Unpack
from urllib.parse import urlsplit

from penstock.client.brokers import Brokers
from penstock.client.connection import Endpoint, Link
from penstock.client.former_names import renamed
from penstock.client.producer import Producer, ProducerOptions
from penstock.client.reader import FETCH_FLAGS, Reader, ReaderOptions, Start, ask
from penstock.client.records import BatchNumbers, RecordFields, outgoing, produce_frame
from penstock.errors import InvalidRequest, NotFound, Unavailable
from penstock.net.addresses import Address, Token, parse_addresses
from penstock.protocol import frames
from penstock.protocol.frames import (
    BATCH_ANSWER,
    FETCHED_ANSWER,
    TIMESTAMP,
    U64,
    Body,
    Bytes,
    Command,
    Info,
)
from penstock.protocol.names import partition_label
from penstock.protocol.partitions import Rotation, partition_of
from penstock.protocol.record_batch import Batch, Record

INFO_SECONDS = 60.0  # after which a client sees new partitions of a topic
CONSUME_BYTES = 1 << 20  # of one fetch
CONNECT_SECONDS = 5.0


class TopicBroker:
    """The shared connection of a client's topics. Connects when it is first used."""

    def __init__(
        self,
        endpoint: Endpoint | Callable[[], Awaitable[Endpoint]],
        *,
        timeout: float,
        token: Token | None,
    ) -> None:
        self._endpoint, self._token, self._timeout = endpoint, token, timeout
        self._link = self.new_link()
        # by topic; each with the time until which it is valid
        self._infos: dict[str, tuple[Info | None, float]] = {}
        self.numbers: dict[str, BatchNumbers] = {}  # of `Topic.produce`, by partition label
        self.rotation = Rotation()

    def new_link(self) -> Link:
        """Return a connection of its own, for a producer or a reader."""
        return Link(self._endpoint, CONNECT_SECONDS, self._token)

    async def ask(self, command: Command, *parts: bytes) -> memoryview:
        return await self.send(frames.request(command, *parts))

    async def send(self, frame: bytes) -> memoryview:
        return await ask(self._link, frame, self._timeout)

    async def info(self, label: str) -> Info:
        return frames.read_info(await self.ask(Command.TOPIC_INFO, frames.name(label)))

    async def recent_info(self, topic: str) -> Info | None:
        """Return the topic's info, at most a minute old; None if it did not exist."""
        now = asyncio.get_running_loop().time()
        info, until = self._infos.get(topic, (None, 0.0))
        if now >= until:
            try:
                info = await self.info(topic)
            except NotFound:
                info = None
            self._infos[topic] = info, now + INFO_SECONDS
        return info

    def forget(self, topic: str) -> None:
        """Drop the remembered info: the topic has changed."""
        self._infos.pop(topic, None)

    def close(self) -> None:
        self._link.close()


class Topic:
    """A topic: append records, read them from any offset, or consume them as a group."""

    def __init__(self, broker: TopicBroker, name: str) -> None:
        self._broker = broker
        self.name = name

    async def create(
        self, *, format: str | None = None, partitions: int = 1, shared: bool = False
    ) -> None:
        """Create the topic, in the broker's default format unless `format` ("aiq" or "kafka") names
        one. A `shared` topic belongs to no broker: every one on the same database serves it. Does
        nothing if it exists.
        """
        if shared:
            if format not in (None, "kafka"):
                raise InvalidRequest("a shared topic has the format 'kafka'")
        elif format is None and partitions == 1:
            await self._broker.ask(Command.CREATE_TOPIC, frames.name(self.name))
            return
        form = "shared" if shared else format or ""
        await self._broker.send(frames.create_partitioned(self.name, form, partitions))
        self._broker.forget(self.name)

    async def delete(self) -> None:
        """Delete the topic and all its records. Raises `NotFound` if it does not exist."""
        await self._broker.ask(Command.DELETE_TOPIC, frames.name(self.name))
        self._broker.forget(self.name)

    async def info(self) -> Info:
        """Return offsets, number of records, bytes, segments, incarnation and policy. Raises
        `NotFound` if the topic does not exist.
        """
        return await self._broker.info(self.name)

    async def next_offset(self, *, partition: int = 0) -> int:
        """Return the offset that the next record will get; 0 if the topic does not exist."""
        if partition:
            return (await self._broker.info(self._label(partition))).next_offset
        body = await self._broker.ask(Command.NEXT_OFFSET, frames.name(self.name))
        return int(Body(body).take(U64)[0])

    async def offset_at(self, at: datetime, *, partition: int = 0) -> int:
        """Return the offset of the first record appended at or after `at`, or the next offset if
        there is none.
        """
        milliseconds = TIMESTAMP.pack(round(at.timestamp() * 1000))
        name = frames.name(self._label(partition))
        body = await self._broker.ask(Command.OFFSET_AT, name, milliseconds)
        return int(Body(body).take(U64)[0])

    async def produce(self, *payloads: Bytes | None, **fields: Unpack[RecordFields]) -> int:
        """Append the payloads as one batch: all of them or none, and once even if the request is
        retried. Returns the offset of the first one. All records get the `key`, `headers` and
        `timestamp`; a payload of None is a tombstone. Without a `partition`, the key selects one;
        without a key too, batches go to the partitions in turn.
        """
        if not payloads:
            raise InvalidRequest("nothing to produce")
        key, partition = fields.get("key"), fields.get("partition")
        if partition is None:
            info = await self._broker.recent_info(self.name)
            count = info.partitions if info is not None else 1
            if count > 1:
                rotated = self._broker.rotation.next(count)
                partition = rotated if key is None else partition_of(key, count)
        label = self._label(partition or 0)
        records = [outgoing(payload, fields) for payload in payloads]
        numbers = self._broker.numbers.setdefault(label, BatchNumbers())
        async with numbers.turn:  # a retried batch must not be overtaken
            number = numbers.id, numbers.take()
            try:
                body = await self._broker.send(b"".join(produce_frame(label, records, number)))
                return int(Body(body).take(BATCH_ANSWER)[0])
            except BaseException:  # refused, without an answer, or cancelled: the next one can pass
                numbers.renew_id()
                raise

    async def consume(
        self, start: int = 0, max_records: int = 100, *, partition: int = 0
    ) -> list[Record]:
        """Return up to `max_records` records from offset `start`. The list is empty at the end of
        the topic, or if the topic does not exist.
        """
        info = await self._broker.recent_info(self.name)
        if partition or (info is not None and info.format == "kafka"):
            return await self._consume_batches(partition, start, max_records)
        body = await self._broker.send(frames.consume(self.name, start, max_records))
        return [Record(*record) for record in frames.read_consumed(body)]

    async def _consume_batches(self, partition: int, start: int, most: int) -> list[Record]:
        label = self._label(partition)
        try:
            info = await self._broker.info(label)
        except NotFound:
            return []
        records, at = list[Record](), max(start, info.first_offset)
        while len(records) < most and at < info.next_offset:
            frame = frames.fetch(label, at, CONSUME_BYTES, 0, FETCH_FLAGS)
            fetched = frames.read_fetched(await self._broker.send(frame), FETCH_FLAGS)
            records += Batch.decoded(self.name, partition, fetched.raw, at, fetched.next_offset)
            at = fetched.next_offset
        return records[:most]

    @renamed(from_="start")
    def tail(self, start: Start = "latest", *, partition: int = 0) -> AsyncGenerator[Record, None]:
        """Iterate over records and keep waiting for new ones. `start` is an offset, a time,
        "earliest" or "latest".
        """
        return _records(self.reader(start, partition=partition))

    @renamed(from_="start")
    def read(
        self, start: Start = "earliest", *, partition: int = 0
    ) -> AsyncGenerator[Record, None]:
        """Iterate over the existing records, from `start` to the end of the topic."""
        return _records(self.reader(start, partition=partition, follow=False))

    def group(self, name: str) -> "TopicGroup":
        """Return a consumer group on this topic. Its members share the records."""
        return TopicGroup(self, name)

    def producer(self, **options: Unpack[ProducerOptions]) -> Producer:
        """Create a producer that sends records in batches, over a connection of its own."""
        return Producer(self._broker.new_link(), self.name, **options)

    @renamed(from_="start")
    def reader(self, start: Start = "earliest", **options: Unpack[ReaderOptions]) -> Reader:
        """Create a reader for batches and positions, over a connection of its own. It starts at an
        offset, a time, "earliest" or "latest", or reads as a member of a `group`.
        """
        return Reader(self._broker.new_link(), self.name, start, **options)

    def _label(self, partition: int) -> str:
        return partition_label(self.name, partition)


async def _records(reader: Reader) -> AsyncGenerator[Record, None]:
    async with reader, aclosing(reader.batches()) as batches:
        async for batch in batches:
            for record in batch:
                yield record


class TopicGroup:
    """A consumer group on a topic."""

    def __init__(self, topic: Topic, name: str) -> None:
        self._topic = topic
        self.topic, self.name = topic.name, name

    async def take(
        self,
        *,
        max_records: int = 10_000,
        follow: bool = True,
        member: str | None = None,
        partition: int = 0,
    ) -> AsyncGenerator[Batch, None]:
        """Iterate over batches that no other member of the group gets, without end or, with
        `follow=False`, up to the end of the topic. A batch is completed when you ask for the next
        one.
        """
        reader = self._topic.reader(
            group=self.name,
            max_records=max_records,
            follow=follow,
            member=member,
            partition=partition,
        )
        async with reader, aclosing(reader.batches()) as batches:
            async for batch in batches:
                yield batch

    async def commit(self, offset: int, *, partition: int = 0) -> None:
        """Set the committed offset: all records before `offset` count as read."""
        await self._ask(Command.GROUP_COMMIT, partition, U64.pack(offset))

    async def committed(self, *, partition: int = 0) -> tuple[int, int]:
        """Return the committed offset and the lag in records."""
        offset, lag = Body(await self._ask(Command.GROUP_FETCH, partition)).take(FETCHED_ANSWER)
        return offset, lag

    async def _ask(self, command: Command, partition: int, *parts: bytes) -> memoryview:
        label = frames.name(self._topic._label(partition))
        return await self._topic._broker.ask(command, label, frames.name(self.name), *parts)


async def find_endpoint(brokers: Brokers, context: Callable[[], ssl.SSLContext]) -> Endpoint:
    """Ask the brokers for their TCP addresses."""
    addresses: list[Address] = []
    secure: set[bool] = set()
    failures: list[str] = []
    for url, status in await brokers.statuses():
        if isinstance(status, Exception):
            failures.append(f"{url}: {status}")
        elif listener := status.listeners.get("TCP"):
            ((host, port),), tls = parse_addresses(listener)
            addresses.append((urlsplit(url).hostname or host, port))
            secure.add(tls)
    if not addresses and failures:
        raise Unavailable(f"no broker answered with its TCP address ({'; '.join(failures)})")
    if not addresses:
        raise InvalidRequest(
            f"{', '.join(brokers.urls)}: no broker there serves topics over TCP "
            "(topics.enabled and tcp_server.enabled). If another one does, name it: "
            'Client(..., topics="tcp://host:12345") or PENSTOCK_BROKER'
        )
    if len(secure) > 1:
        raise InvalidRequest("some of the brokers' TCP ports speak TLS and some do not")
    return Endpoint(addresses, context() if secure == {True} else None)
