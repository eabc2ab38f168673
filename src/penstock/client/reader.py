"""Reading a topic: batch after batch from an offset on, or the ranges a consumer group leases to
this member.

A reader has a connection of its own, since a waiting FETCH holds back the answers behind it. While
the caller works on one batch the next ones are already being received: the FETCH for what follows
goes out as soon as the head of an answer has arrived, up to `MAX_AHEAD` of them. A lost connection
is made again and reading resumes at the position reached, so nothing is skipped or repeated. A
topic that was deleted and created again in between is another topic: `Conflict`, not silence.

With a group, members lease ranges of offsets and read only those. A range counts as done when the
caller asks for what comes after it, so records are repeated, never lost, when a member stops in the
middle (at least once).
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import datetime
from typing import Literal, Self, TypedDict, Unpack

from penstock.client.connection import Connection, Link, Waiting
from penstock.client.items import check_names
from penstock.errors import (
    Conflict,
    ConnectionLost,
    InvalidOffset,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from penstock.net.retry import Backoff
from penstock.protocol import frames
from penstock.protocol.frames import (
    FETCH_ANSWER,
    LEASE_ANSWER,
    LEASE_REQUEST,
    TIMESTAMP,
    U32,
    U64,
    Body,
    Command,
    Fetched,
    Info,
)
from penstock.protocol.names import partition_label
from penstock.protocol.record_batch import Batch, Record
from penstock.protocol.status import MAY_PASS

log = logging.getLogger("penstock.client")

FETCH_FLAGS = frames.LENGTHS | frames.FORMAT
MAX_AHEAD = 2  # FETCHes under way beyond the batch the caller has
Start = int | datetime | Literal["earliest", "latest"]


class ReaderOptions(TypedDict, total=False):
    """The options of `Topic.reader`."""

    partition: int  # of the topic; default 0
    group: str | None  # read as a member of this consumer group
    member: str | None  # name in the group; default: process id and a random part
    max_bytes: int  # of one fetch; default 1 MiB
    max_records: int  # of one leased range, in a group; default 10,000
    wait: float  # seconds the broker waits for new records per fetch; default 10
    follow: bool  # False: end at the end of the topic; default True
    on_lost: Literal["fail", "earliest"]  # if retention deleted the next records; default "fail"
    timeout: float  # seconds to retry while no broker answers; default 60


class Reader:
    """Reads a topic. Create it with `Topic.reader`. Iterate over it for records, or over
    `batches()`.
    """

    def __init__(
        self, link: Link, topic: str, start: Start, **options: Unpack[ReaderOptions]
    ) -> None:
        check_names(options, ReaderOptions)
        if isinstance(start, int) and start < 0:
            raise InvalidRequest(f"an offset is 0 or more, not {start}")
        self.topic = topic
        self.partition, self.group = options.get("partition", 0), options.get("group")
        self._label = partition_label(topic, self.partition)
        self.member = options.get("member") or f"{os.getpid()}-{os.urandom(4).hex()}"
        self.position: int | None = None  # next to be handed out; None before the first batch
        self.log_end: int | None = None  # as of the last answer
        self.incarnation: bytes | None = None
        self._link = link
        self._lease: frames.Lease | None = None
        self._start = start
        self._max_bytes = options.get("max_bytes", 1 << 20)
        self._max_records = options.get("max_records", 10_000)
        self._wait, self._follow = options.get("wait", 10.0), options.get("follow", True)
        self._on_lost = options.get("on_lost", "fail")
        self._timeout = options.get("timeout", 60.0)
        self._flags = FETCH_FLAGS
        # FETCHes already sent, in order: on which connection, from which offset.
        self._ahead: deque[tuple[Connection, int, asyncio.Future[memoryview]]] = deque()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Release leased ranges and close the connection."""
        self._forget_ahead()
        if self.group is not None:
            # otherwise the leases expire
            with contextlib.suppress(Unavailable, NotFound):
                await self._ask(
                    Command.GROUP_LEAVE, *self._names(), frames.name(self.member), timeout=1.0
                )
        self._link.close()

    async def __aiter__(self) -> AsyncIterator[Record]:
        async for batch in self.batches():
            for record in batch:
                yield record

    def batches(self) -> AsyncGenerator[Batch, None]:
        """Iterate over batches, in order. Ends at the end of the topic if `follow` is False."""
        return self._owned() if self.group is None else self._leased()

    # Alone

    async def _owned(self) -> AsyncGenerator[Batch, None]:
        if self.position is None:
            self.position = await self._first_position()
        while True:
            batch = await self._next(self.position, self._follow)
            self.position = batch.next_offset  # an empty one passes over offsets without records
            if batch.count:
                yield batch
            elif not self._follow:
                return

    async def _first_position(self) -> int:
        start = self._start
        if isinstance(start, int):
            return start
        if isinstance(start, datetime):
            at = TIMESTAMP.pack(round(start.timestamp() * 1000))
            body = await self._ask(Command.OFFSET_AT, frames.name(self._label), at)
            return int(Body(body).take(U64)[0])
        info = await self._info()
        return info.first_offset if start == "earliest" else info.next_offset

    async def _info(self) -> Info:
        return frames.read_info(await self._ask(Command.TOPIC_INFO, frames.name(self._label)))

    async def _next(self, offset: int, wait: bool, limit: int | None = None) -> Batch:
        """Return one FETCH answer from `offset` on; empty at the end. Retries passing errors, until
        `timeout`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        backoff = Backoff()
        while True:
            try:
                fetched = await self._fetch(offset, self._wait if wait else 0.0, deadline, limit)
                break
            except InvalidOffset:
                if self._on_lost == "fail":
                    raise
                offset = await self._earliest_after(offset)
            except InvalidRequest as error:
                # A broker of 0.2.0 has no record batches and does not know this flag.
                if not self._flags & frames.FORMAT or frames.UNKNOWN_FLAGS not in str(error):
                    raise
                self._flags &= ~frames.FORMAT
            except Unavailable:
                delay = backoff.delay()
                if loop.time() + delay > deadline:
                    raise
                await asyncio.sleep(delay)
        if self.incarnation is None:
            self.incarnation = fetched.incarnation
        elif self.incarnation != fetched.incarnation:
            raise Conflict(f"topic {self.topic!r} was deleted and created again while it was read")
        self.log_end = fetched.log_end
        if fetched.format == frames.RECORD_BATCHES:
            following = fetched.next_offset
            return Batch.decoded(self.topic, self.partition, fetched.raw, offset, following)
        return Batch(self.topic, fetched.first_offset, fetched.raw, fetched.lengths)

    async def _earliest_after(self, offset: int) -> int:
        info = await self._info()
        if offset > info.next_offset:
            raise InvalidOffset(
                f"offset {offset} of topic {self.topic!r} is beyond its end, {info.next_offset}"
            )
        return info.first_offset

    async def _fetch(self, offset: int, wait: float, deadline: float, limit: int | None) -> Fetched:
        connection = await self._link.connection(deadline)
        if self._ahead and self._ahead[0][:2] == (connection, offset):
            answer = self._ahead.popleft()[2]
        else:
            self._forget_ahead()
            answer = self._send(connection, offset, wait, limit)
        try:
            async with asyncio.timeout(wait + self._timeout):
                body = await answer
        except TimeoutError:
            connection.close()
            raise Unavailable(
                f"no answer from the broker within {wait + self._timeout:g} s"
            ) from None
        if not self._ahead:
            self._send_ahead(connection, body, limit)
        return frames.read_fetched(body, self._flags)

    def _send(
        self, connection: Connection, offset: int, wait: float, limit: int | None
    ) -> "asyncio.Future[memoryview]":
        def started(head: memoryview) -> None:
            if len(head) >= FETCH_ANSWER.size and len(self._ahead) < MAX_AHEAD:
                self._send_ahead(connection, head, limit)

        frame = frames.fetch(self._label, offset, self._max_bytes, round(wait * 1000), self._flags)
        return connection.request(frame, started)

    def _send_ahead(self, connection: Connection, body: memoryview, limit: int | None) -> None:
        """Ask for what follows this answer, when there is more: it travels while this one is looked
        at.
        """
        _, _, following, end, _ = FETCH_ANSWER.unpack_from(body)
        if following < (end if limit is None else min(end, limit)) and connection.alive:
            self._ahead.append(
                (connection, following, self._send(connection, following, 0.0, limit))
            )

    def _forget_ahead(self) -> None:
        for _, _, answer in self._ahead:
            answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        self._ahead.clear()

    # In a group

    async def _leased(self) -> AsyncGenerator[Batch, None]:
        while True:
            lease = self._lease = await self._next_lease()
            if lease.start == lease.end:
                if not self._follow:
                    return
                continue
            half = time.monotonic() + lease.expires_in / 2
            at = self.position = lease.start
            try:
                behind = False
                while at < lease.end:
                    batch = (await self._next(at, wait=behind, limit=lease.end)).until(lease.end)
                    # Another broker may know of newer records of a shared topic than this one.
                    behind = (self.log_end or 0) < lease.end
                    if batch.count:
                        at = self.position = batch.next_offset
                        yield batch
                    elif not behind:
                        break  # the rest of the range aged out
                    if at < lease.end and time.monotonic() > half:
                        half = time.monotonic() + await self._renew(lease) / 2
                self.position = lease.end
                await self.complete()
            except (Conflict, InvalidRequest) as error:
                log.warning(
                    "group %s: offsets %d to %d were lost to another member: %s",
                    self.group,
                    *lease[1:3],
                    error,
                )

    async def complete(self) -> None:
        """Complete the leased range if all of it was handed out. Asking for the next batch does
        this, too.
        """
        lease, self._lease = self._lease, None
        if (
            lease is not None
            and self.position is not None
            and lease.start < lease.end <= self.position
        ):
            await self._ask(Command.GROUP_COMPLETE, *self._names(), lease.id)

    async def _renew(self, lease: frames.Lease) -> float:
        body = await self._ask(Command.GROUP_RENEW, *self._names(), lease.id)
        return float(Body(body).take(U32)[0]) / 1000

    async def _next_lease(self) -> frames.Lease:
        wait = self._wait if self._follow else 0.0
        limits = LEASE_REQUEST.pack(self._max_records, round(wait * 1000))
        body = await self._ask(
            Command.GROUP_LEASE,
            *self._names(),
            frames.name(self.member),
            limits,
            timeout=self._timeout + wait,
        )
        lease, start, end, milliseconds = Body(body).take(LEASE_ANSWER)
        return frames.Lease(bytes(lease), start, end, milliseconds / 1000)

    def _names(self) -> tuple[bytes, bytes]:
        return frames.name(self._label), frames.name(self.group or "")

    async def _ask(
        self, command: Command, *parts: bytes, timeout: float | None = None
    ) -> memoryview:
        return await ask(self._link, frames.request(command, *parts), timeout or self._timeout)


async def ask(link: Link, frame: bytes, timeout: float) -> memoryview:
    """Send a request that may be sent twice, until it is answered or `timeout` has passed."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    backoff = Backoff()
    waiting = Waiting("a request")
    while True:
        connection: Connection | None = None
        try:
            connection = await link.connection(deadline, waiting)
            async with asyncio.timeout_at(deadline):
                return await connection.request(frame)
        except TimeoutError:
            if connection is not None:
                connection.close()
            raise waiting.error or Unavailable(
                f"no answer from the broker within {timeout:g} s"
            ) from None
        except MAY_PASS as error:
            delay = backoff.delay()
            if loop.time() + delay > deadline:
                raise
            if not isinstance(error, ConnectionLost):
                waiting.note(error, deadline - loop.time())
            await asyncio.sleep(delay)
