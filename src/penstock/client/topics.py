"""All topics of a broker, over the binary protocol. `Client.topic` gives one of them and is what
to use: `TopicClient` stays for one release, for programs that were written before.

    async with TopicClient("127.0.0.1:12345") as client:
        async with client.producer("orders") as producer:
            await producer.send(b"one")
        async for record in client.reader("orders", "earliest", follow=False):
            print(record.offset, record.payload)

Several addresses may be given; the first that answers is used, and the next one when it is lost.
Requests that may be sent twice are sent again after a lost connection until `timeout`; `produce`
carries a producer id, so that includes it.
"""

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Self, Unpack

from penstock.client.batch_numbers import BatchNumbers
from penstock.client.connection import Endpoint, Link
from penstock.client.new_records import RecordFields, outgoing, produce_frame
from penstock.client.producer import Producer, ProducerOptions
from penstock.client.reader import FETCH_FLAGS, Reader, ReaderOptions, Start, ask
from penstock.errors import InvalidRequest, NotFound
from penstock.net.addresses import Address, Token, parse_addresses
from penstock.net.tls import client_context
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

INFO_SECONDS = 60.0  # after which a client notices that a topic got more partitions
CONSUME_BYTES = 1 << 20  # of one fetch


class _PlainProducer:
    """The producer that `Topics.produce` is to one topic."""

    __slots__ = ("numbers", "turn")

    def __init__(self) -> None:
        self.numbers = BatchNumbers()
        self.turn = asyncio.Lock()  # one batch at a time: a retried one must not be overtaken


class Topics:
    """The topics at an endpoint: `penstock.Client` has one. Connects when first used."""

    def __init__(
        self,
        endpoint: Endpoint | Callable[[], Awaitable[Endpoint]],
        *,
        timeout: float = 30.0,
        connect_timeout: float = 5.0,
        token: Token | None = None,
    ) -> None:
        self._endpoint, self._token = endpoint, token
        self._timeout, self._connect_timeout = timeout, connect_timeout
        self._link = self._new_link()
        self._plain_producers: dict[str, _PlainProducer] = {}  # by partition
        # By topic, and until when they count.
        self._infos: dict[str, tuple[Info | None, float]] = {}
        self._rotation = Rotation()

    def _new_link(self) -> Link:
        return Link(self._endpoint, self._connect_timeout, self._token)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the shared connection. Producers and readers have their own; close them first."""
        self._link.close()

    # Topics

    async def create(self, topic: str, *, format: str | None = None, partitions: int = 1) -> None:
        """Create the topic, in the broker's default format unless `format` ("aiq" or "kafka") names
        one. Does nothing if it exists.
        """
        if format is None and partitions == 1:
            await self._ask(Command.CREATE_TOPIC, frames.name(topic))
            return
        frame = frames.create_partitioned(topic, format or "", partitions)
        await ask(self._link, frame, self._timeout)
        self._infos.pop(topic, None)

    async def delete(self, topic: str) -> None:
        """Delete the topic and all its records. Raises `NotFound` if it does not exist."""
        await self._ask(Command.DELETE_TOPIC, frames.name(topic))
        self._infos.pop(topic, None)

    async def names(self) -> list[str]:
        """Return the names of all topics, sorted."""
        return frames.read_names(await self._ask(Command.LIST_TOPICS))

    async def info(self, topic: str) -> Info:
        """Return offsets, number of records, bytes, segments, incarnation and policy. Raises
        `NotFound` if the topic does not exist.
        """
        return frames.read_info(await self._ask(Command.TOPIC_INFO, frames.name(topic)))

    async def next_offset(self, topic: str, *, partition: int = 0) -> int:
        """Return the offset that the next record will get; 0 if the topic does not exist."""
        if partition:
            return (await self.info(partition_label(topic, partition))).next_offset
        return int(Body(await self._ask(Command.NEXT_OFFSET, frames.name(topic))).take(U64)[0])

    async def offset_at(self, topic: str, at: datetime, *, partition: int = 0) -> int:
        """Return the offset of the first record appended at or after `at`, or the next offset if
        there is none.
        """
        milliseconds = TIMESTAMP.pack(round(at.timestamp() * 1000))
        name = frames.name(partition_label(topic, partition))
        body = await self._ask(Command.OFFSET_AT, name, milliseconds)
        return int(Body(body).take(U64)[0])

    # Records

    async def produce(
        self, topic: str, *payloads: Bytes | None, **fields: Unpack[RecordFields]
    ) -> int:
        """Append the payloads as one batch: all of them or none, and once even if the request is
        retried. Returns the offset of the first one. A `key`, `headers` and a `timestamp` are those
        of every record; a payload of None is a tombstone. Without a `partition` the key decides, or
        batches rotate.
        """
        if not payloads:
            raise InvalidRequest("nothing to produce")
        key, partition = fields.get("key"), fields.get("partition")
        if partition is None:
            info = await self._about(topic)
            count = info.partitions if info is not None else 1
            if count > 1:
                rotated = self._rotation.next(count)
                partition = rotated if key is None else partition_of(key, count)
        label = partition_label(topic, partition or 0)
        records = [outgoing(payload, fields) for payload in payloads]
        producer = self._plain_producers.setdefault(label, _PlainProducer())
        async with producer.turn:
            number = producer.numbers.id, producer.numbers.take()
            try:
                pieces = produce_frame(label, records, number)
                body = await ask(self._link, b"".join(pieces), self._timeout)
                return int(Body(body).take(BATCH_ANSWER)[0])
            except BaseException:  # refused, without an answer, or cancelled: the next one can pass
                producer.numbers.renew_id()
                raise

    async def _about(self, topic: str) -> Info | None:
        """What a topic was like, a minute ago at most; None: it did not exist."""
        now = asyncio.get_running_loop().time()
        info, until = self._infos.get(topic, (None, 0.0))
        if now >= until:
            try:
                info = await self.info(topic)
            except NotFound:
                info = None
            self._infos[topic] = info, now + INFO_SECONDS
        return info

    async def consume(
        self, topic: str, start: int = 0, max_records: int = 100, *, partition: int = 0
    ) -> list[Record]:
        """Return up to `max_records` records from offset `start`. The list is empty at the end of
        the topic, or if there is no such topic.
        """
        info = await self._about(topic)
        if partition or (info is not None and info.format == "kafka"):
            return await self._consume_batches(topic, partition, start, max_records)
        body = await ask(self._link, frames.consume(topic, start, max_records), self._timeout)
        return [Record(*record) for record in frames.read_consumed(body)]

    async def _consume_batches(
        self, topic: str, partition: int, start: int, most: int
    ) -> list[Record]:
        label = partition_label(topic, partition)
        try:
            info = await self.info(label)
        except NotFound:
            return []
        records, at = list[Record](), max(start, info.first_offset)
        while len(records) < most and at < info.next_offset:
            frame = frames.fetch(label, at, CONSUME_BYTES, 0, FETCH_FLAGS)
            fetched = frames.read_fetched(await ask(self._link, frame, self._timeout), FETCH_FLAGS)
            records += Batch.decoded(topic, partition, fetched.raw, at, fetched.next_offset)
            at = fetched.next_offset
        return records[:most]

    def producer(self, topic: str, **options: Unpack[ProducerOptions]) -> Producer:
        """Create a producer that sends records in batches, over a connection of its own."""
        return Producer(self._new_link(), topic, **options)

    def reader(
        self, topic: str, start: Start = "earliest", **options: Unpack[ReaderOptions]
    ) -> Reader:
        """Create a reader over a connection of its own. It starts at an offset, a time, "earliest"
        or "latest", or reads as a member of a `group`.
        """
        return Reader(self._new_link(), topic, start, **options)

    # Groups

    async def commit(self, topic: str, group: str, offset: int, *, partition: int = 0) -> None:
        """Set the committed offset: all records before `offset` count as read."""
        names = frames.name(partition_label(topic, partition)), frames.name(group)
        await self._ask(Command.GROUP_COMMIT, *names, U64.pack(offset))

    async def committed(self, topic: str, group: str, *, partition: int = 0) -> tuple[int, int]:
        """Return the committed offset and the lag in records."""
        names = frames.name(partition_label(topic, partition)), frames.name(group)
        body = await self._ask(Command.GROUP_FETCH, *names)
        offset, lag = Body(body).take(FETCHED_ANSWER)
        return offset, lag

    async def _ask(self, command: Command, *parts: bytes) -> memoryview:
        return await ask(self._link, frames.request(command, *parts), self._timeout)


class TopicClient(Topics):
    """A client of topics only. Deprecated: use `Client(...).topic(name)`. It remains for one
    more release.
    """

    def __init__(
        self,
        addresses: str | Sequence[str | Address] = "127.0.0.1:12345",
        *,
        timeout: float = 30.0,
        connect_timeout: float = 5.0,
        token: Token | None = None,
        ca: str | Path | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`token` (default: PENSTOCK_TOKEN) authenticates the client. For `tls://host:port`, `ca`
        is the CA certificate to trust, as a PEM file or its text (default: PENSTOCK_CA_FILE, or the
        system's), or `tls` is an `ssl.SSLContext`.
        """
        parsed, secure = parse_addresses(addresses)
        super().__init__(
            Endpoint(parsed, (tls or client_context(ca)) if secure else None),
            timeout=timeout,
            connect_timeout=connect_timeout,
            token=token if token is not None else os.environ.get("PENSTOCK_TOKEN"),
        )
