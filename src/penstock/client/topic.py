"""One topic, and one group on it: what `Client.topic` gives.

The binary port is found by itself: brokers name their listeners in `/health`, and we connect to
that port on the host whose URL we were given. Where the port is another one on the way (a mapped
port of a container), name it with `topics="tcp://host:port"`.
"""

import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import datetime
from typing import Unpack
from urllib.parse import urlsplit

from penstock.client.brokers import Brokers
from penstock.client.connection import Endpoint
from penstock.client.new_records import RecordFields
from penstock.client.producer import Producer, ProducerOptions
from penstock.client.reader import Reader, ReaderOptions, Start
from penstock.client.topics import Topics
from penstock.errors import InvalidRequest, Unavailable
from penstock.net.addresses import Address, parse_addresses
from penstock.protocol.frames import Bytes, Info
from penstock.protocol.record_batch import Batch, Record


class Topic:
    """A topic: append records, read them from any offset, or consume them as a group."""

    def __init__(self, topics: Topics, name: str) -> None:
        self._topics = topics
        self.name = name

    async def create(self, *, format: str | None = None, partitions: int = 1) -> None:
        """Create the topic, in the broker's default format unless `format` ("aiq" or "kafka") names
        one. Does nothing if it exists.
        """
        await self._topics.create(self.name, format=format, partitions=partitions)

    async def delete(self) -> None:
        """Delete the topic and all its records. Raises `NotFound` if it does not exist."""
        await self._topics.delete(self.name)

    async def info(self) -> Info:
        """Return offsets, number of records, bytes and segments. Raises `NotFound` if the topic
        does not exist.
        """
        return await self._topics.info(self.name)

    async def next_offset(self, *, partition: int = 0) -> int:
        """Return the offset that the next record will get; 0 if the topic does not exist."""
        return await self._topics.next_offset(self.name, partition=partition)

    async def offset_at(self, at: datetime, *, partition: int = 0) -> int:
        """Return the offset of the first record appended at or after `at`, or the next offset if
        there is none.
        """
        return await self._topics.offset_at(self.name, at, partition=partition)

    async def produce(self, *payloads: Bytes | None, **fields: Unpack[RecordFields]) -> int:
        """Append the payloads as one batch: all of them or none, and once even if the request is
        retried. Returns the offset of the first one. A `key`, `headers` and a `timestamp` are those
        of every record; a payload of None is a tombstone. Without a `partition` the key decides, or
        batches rotate.
        """
        return await self._topics.produce(self.name, *payloads, **fields)

    async def consume(
        self, start: int = 0, max_records: int = 100, *, partition: int = 0
    ) -> list[Record]:
        """Return up to `max_records` records from offset `start`. The list is empty at the end of
        the topic.
        """
        return await self._topics.consume(self.name, start, max_records, partition=partition)

    def tail(self, from_: Start = "latest", *, partition: int = 0) -> AsyncGenerator[Record, None]:
        """Iterate over records and keep waiting for new ones. `from_` is an offset, a time,
        "earliest" or "latest".
        """
        return _records(self.reader(from_, partition=partition))

    def read(
        self, from_: Start = "earliest", *, partition: int = 0
    ) -> AsyncGenerator[Record, None]:
        """Iterate over the existing records, from `from_` to the end of the topic."""
        return _records(self.reader(from_, partition=partition, follow=False))

    def group(self, name: str) -> "TopicGroup":
        """Return a consumer group on this topic. Its members share the records."""
        return TopicGroup(self._topics, self.name, name)

    def producer(self, **options: Unpack[ProducerOptions]) -> Producer:
        """Create a producer that sends records in batches, over a connection of its own."""
        return self._topics.producer(self.name, **options)

    def reader(self, from_: Start = "earliest", **options: Unpack[ReaderOptions]) -> Reader:
        """Create a reader for batches and positions, over a connection of its own."""
        return self._topics.reader(self.name, from_, **options)


async def _records(reader: Reader) -> AsyncGenerator[Record, None]:
    async with reader, aclosing(reader.batches()) as batches:
        async for batch in batches:
            for record in batch:
                yield record


class TopicGroup:
    """A consumer group on a topic."""

    def __init__(self, topics: Topics, topic: str, name: str) -> None:
        self._topics = topics
        self.topic, self.name = topic, name

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
        reader = self._topics.reader(
            self.topic,
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
        await self._topics.commit(self.topic, self.name, offset, partition=partition)

    async def committed(self, *, partition: int = 0) -> tuple[int, int]:
        """Return the committed offset and the lag in records."""
        return await self._topics.committed(self.topic, self.name, partition=partition)


class TopicFinder:
    """Asks the brokers where they serve topics; called before each connection."""

    def __init__(self, brokers: Brokers, context: Callable[[], ssl.SSLContext]) -> None:
        self._brokers, self._context = brokers, context

    async def __call__(self) -> Endpoint:
        addresses: list[Address] = []
        secure: set[bool] = set()
        failures: list[str] = []
        for url, status in await self._brokers.statuses():
            if isinstance(status, Exception):
                failures.append(f"{url}: {status}")
            elif listener := status.listeners.get("TCP"):
                ((host, port),), tls = parse_addresses(listener)
                addresses.append((urlsplit(url).hostname or host, port))
                secure.add(tls)
        if not addresses and failures:
            raise Unavailable(f"no broker says where its topics are ({'; '.join(failures)})")
        if not addresses:
            raise InvalidRequest(
                f"{', '.join(self._brokers.urls)}: no broker there serves topics over TCP "
                "(topics.enabled and tcp_server.enabled). If another one does, name it: "
                'Client(..., topics="tcp://host:12345") or PENSTOCK_BROKER'
            )
        if len(secure) > 1:
            raise InvalidRequest("some of the brokers' TCP ports speak TLS and some do not")
        return Endpoint(addresses, self._context() if secure == {True} else None)
