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
from penstock.client.producer import Producer, ProducerOptions
from penstock.client.reader import Reader, ReaderOptions, Start, ask
from penstock.errors import InvalidRequest
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
from penstock.protocol.record_batch import Record


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
        self._plain_producers: dict[str, _PlainProducer] = {}  # by topic

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

    async def create(self, topic: str) -> None:
        """Create the topic. Does nothing if it exists."""
        await self._ask(Command.CREATE_TOPIC, frames.name(topic))

    async def delete(self, topic: str) -> None:
        """Delete the topic and all its records. Raises `NotFound` if it does not exist."""
        await self._ask(Command.DELETE_TOPIC, frames.name(topic))

    async def names(self) -> list[str]:
        """Return the names of all topics, sorted."""
        return frames.read_names(await self._ask(Command.LIST_TOPICS))

    async def info(self, topic: str) -> Info:
        """Return offsets, number of records, bytes, segments, incarnation and policy. Raises
        `NotFound` if the topic does not exist.
        """
        return frames.read_info(await self._ask(Command.TOPIC_INFO, frames.name(topic)))

    async def next_offset(self, topic: str) -> int:
        """Return the offset that the next record will get; 0 if the topic does not exist."""
        return int(Body(await self._ask(Command.NEXT_OFFSET, frames.name(topic))).take(U64)[0])

    async def offset_at(self, topic: str, at: datetime) -> int:
        """Return the offset of the first record appended at or after `at`, or the next offset if
        there is none.
        """
        milliseconds = TIMESTAMP.pack(round(at.timestamp() * 1000))
        body = await self._ask(Command.OFFSET_AT, frames.name(topic), milliseconds)
        return int(Body(body).take(U64)[0])

    # Records

    async def produce(self, topic: str, *payloads: Bytes) -> int:
        """Append the payloads as one batch: all of them or none, and once even if the request is
        retried. Returns the offset of the first one.
        """
        if not payloads:
            raise InvalidRequest("nothing to produce")
        producer = self._plain_producers.setdefault(topic, _PlainProducer())
        async with producer.turn:
            number = producer.numbers.id, producer.numbers.take()
            try:
                pieces = frames.produce_batch(topic, payloads, number)
                body = await ask(self._link, b"".join(pieces), self._timeout)
                return int(Body(body).take(BATCH_ANSWER)[0])
            except BaseException:  # refused, without an answer, or cancelled: the next one can pass
                producer.numbers.renew_id()
                raise

    async def consume(self, topic: str, start: int = 0, max_records: int = 100) -> list[Record]:
        """Return up to `max_records` records from offset `start`. The list is empty at the end of
        the topic, or if there is no such topic.
        """
        body = await ask(self._link, frames.consume(topic, start, max_records), self._timeout)
        return [Record(*record) for record in frames.read_consumed(body)]

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

    async def commit(self, topic: str, group: str, offset: int) -> None:
        """Set the committed offset: all records before `offset` count as read."""
        names = frames.name(topic), frames.name(group)
        await self._ask(Command.GROUP_COMMIT, *names, U64.pack(offset))

    async def committed(self, topic: str, group: str) -> tuple[int, int]:
        """Return the committed offset and the lag in records."""
        body = await self._ask(Command.GROUP_FETCH, frames.name(topic), frames.name(group))
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
