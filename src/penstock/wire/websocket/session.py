"""A WebSocket connection: requests in, answers and notifications out.

Requests run in the order of their arrival. A request that waits (creating a topic) delays those
after it. A produce does not: it is answered when its record is durable. Reading stops while too
many bytes are in flight, or while the client does not read. Its subscriptions then leave the head
of their feeds, and resume where they were when the client reads again.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable
from functools import partial
from typing import Protocol

import msgspec
from msgspec import UNSET
from msgspec.structs import astuple
from picows import WSCloseCode, WSFrame, WSListener, WSMsgType, WSTransport

from penstock.errors import InvalidRequest, NotFound, Unauthorized
from penstock.protocol.kafka_batch import NewRecord
from penstock.protocol.names import partition_label
from penstock.protocol.status import NOT_JSON, details_of, is_expected
from penstock.topics.store import AnyLog, TopicStore
from penstock.topics.topic import Appended
from penstock.wire.auth import Identity, Role
from penstock.wire.feed import FeedChunk, Feeds, Subscription
from penstock.wire.request_memory import MIN_RATE, SMALL, TOO_MANY, RequestMemory
from penstock.wire.websocket import messages
from penstock.wire.websocket.messages import (
    COMMANDS,
    CommandEnvelope,
    Create,
    Done,
    Failed,
    GetNextOffset,
    ListTopics,
    ProduceCommand,
    ReqId,
    Request,
    Subscribe,
    Unsubscribe,
)

log = logging.getLogger("penstock.websocket")

IN_FLIGHT_BYTES = 8 << 20  # of one session, appends and waiting messages each
SILENT_PERIODS = 4  # keep-alive periods without a frame, until a client is disconnected
PART_SECONDS = 30.0  # time after which a message in several frames must have the minimum rate
TEXT = WSMsgType.TEXT


class SessionServer(Protocol):
    """The server, as its sessions use it."""

    topics: TopicStore
    feeds: Feeds
    memory: RequestMemory
    max_message: int
    received: int

    def opened(self, session: "Session") -> None: ...

    def lost(self, session: "Session") -> None: ...


class _Watch:
    """A subscription of the session."""

    __slots__ = ("name", "session", "subscription")

    def __init__(self, session: "Session", name: str) -> None:
        self.session = session
        self.name = name  # label of the partition
        self.subscription: Subscription | None = None  # until the feed has answered

    def deliver(self, chunk: FeedChunk) -> bool:
        return self.session.send(chunk.notification)

    def ended(self) -> None:
        self.session.topic_gone(self)


class Session(WSListener):
    def __init__(self, server: SessionServer, identity: Identity | None = None) -> None:
        self._server = server
        self._identity = identity  # None: authentication is off
        self._loop = asyncio.get_running_loop()
        self._transport: WSTransport | None = None  # set while it is connected
        self._watches: dict[str, _Watch] = {}  # by label of the partition
        self._parts: list[bytes] = []  # of a message in several frames
        self._parts_size = 0  # bytes of `_parts`, counted in the server's `memory.total`
        self._parts_since = 0.0  # when the first part arrived
        self._inbox: deque[bytes] = deque()  # messages that wait for an earlier one
        self._inbox_size = 0  # bytes of `_inbox`
        self._work: asyncio.Future[None] | None = None  # a request that delays later ones
        self._in_flight = 0  # payload bytes of appends in flight
        self._pending = 0  # number of appends in flight
        self._ending = False  # the server stops: no further request is run
        self._writable = True  # False: the client does not read fast enough
        self._reading = True
        self._silent = 0  # keep-alive periods since the last frame of the client

    # Callbacks of picows

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport
        self._server.opened(self)

    def on_ws_disconnected(self, _: WSTransport) -> None:
        self._transport = None
        if self._work is not None:
            self._work.cancel()
        for watch in list(self._watches.values()):
            if watch.subscription is not None:
                watch.subscription.close()
        self._watches.clear()
        self._inbox.clear()
        self._take_parts()
        self._server.lost(self)

    def pause_writing(self) -> None:
        self._writable = False
        self._adjust_reading()

    def resume_writing(self) -> None:
        self._writable = True
        for watch in list(self._watches.values()):
            if watch.subscription is not None:
                watch.subscription.resume()
        self._resume()

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        self._silent = 0
        kind = frame.msg_type
        if kind == WSMsgType.CLOSE:
            transport.send_close(frame.get_close_code(), frame.get_close_message())
            transport.disconnect()
            return
        if kind not in (WSMsgType.TEXT, WSMsgType.BINARY, WSMsgType.CONTINUATION):
            return  # picows answers pings; a pong has reset `_silent` above
        if kind == WSMsgType.CONTINUATION or not frame.fin:
            part = frame.get_payload_as_bytes()
            if not self._parts:
                self._parts_since = self._loop.time()
            self._parts.append(part)
            self._parts_size += len(part)
            memory = self._server.memory
            memory.total += len(part)
            too_large = self._parts_size > self._server.max_message
            if too_large or (memory.full and self._parts_size > SMALL):
                self._take_parts()
                if too_large:
                    transport.send_close(WSCloseCode.MESSAGE_TOO_BIG, b"the message is too large")
                else:
                    transport.send_close(WSCloseCode.TRY_AGAIN_LATER, TOO_MANY.encode())
                transport.disconnect()
                return
            if not frame.fin:
                return
            data = self._take_parts()
        else:
            data = frame.get_payload_as_bytes()
        self._server.received += 1
        if self._ending:
            return
        if self._inbox or self._held():
            self._inbox.append(data)
            self._inbox_size += len(data)
        else:
            self._run(data)
        self._adjust_reading()

    def _take_parts(self) -> bytes:
        data = b"".join(self._parts)
        self._server.memory.total -= self._parts_size
        self._parts, self._parts_size = [], 0
        return data

    # Requests

    def _held(self) -> bool:
        return self._work is not None or self._in_flight > IN_FLIGHT_BYTES or not self._writable

    def _adjust_reading(self) -> None:
        reading = self._inbox_size < IN_FLIGHT_BYTES and not (self._held() and self._work is None)
        if reading != self._reading and self._transport is not None:
            self._reading = reading
            under = self._transport.underlying_transport
            (under.resume_reading if reading else under.pause_reading)()

    def _resume(self) -> None:
        while self._inbox and not self._held():
            data = self._inbox.popleft()
            self._inbox_size -= len(data)
            self._run(data)
        self._adjust_reading()

    def _run(self, data: bytes) -> None:
        try:
            request: Request = messages.decode(data)
        except NOT_JSON as error:
            self._refuse_invalid(data, error)
            return
        try:
            self._do(request)
        except Exception as error:  # noqa: BLE001 - the connection stays
            self._fail(COMMANDS[type(request)], request.req_id, error)

    def _refuse_invalid(self, data: bytes, error: Exception) -> None:
        try:
            envelope = messages.decode_envelope(data)
        except NOT_JSON:
            envelope = CommandEnvelope()
        named = envelope.command if isinstance(envelope.command, str) else None
        if named is not None and named not in COMMANDS.values():
            error = InvalidRequest(f"unknown command {named!r}")
        elif envelope.command is UNSET and isinstance(error, msgspec.ValidationError):
            error = InvalidRequest("a message is a JSON object with a command")
        else:
            error = InvalidRequest(f"the message is invalid: {error}")
        self._fail(named, envelope.req_id, error)

    def _do(self, request: Request) -> None:
        topics = self._server.topics
        if self._identity is not None:
            self._check(self._identity, request)
        match request:
            case ProduceCommand():
                record = request.record()
                topic = topics.get(partition_label(request.topic, request.partition))
                if topic is None:
                    self._hold_for(self._create_and_produce(request, record), request)
                else:
                    future, size = topic.append_records([record]), len(record.value or b"")
                    self._in_flight += size
                    self._pending += 1
                    future.add_done_callback(partial(self._appended, request, size))
            case Subscribe():
                self._subscribe(request)
            case Unsubscribe():
                label = partition_label(request.topic, request.partition)
                watch = self._watches.pop(label, None)
                if watch is None:
                    raise NotFound(f"Topic '{label}' is not subscribed to.")
                if watch.subscription is not None:
                    watch.subscription.close()
                self._answer(
                    Done("unsubscribe_topic_response", request.req_id, topic=request.topic)
                )
            case Create():
                self._hold_for(self._create(request), request)
            case ListTopics():
                self._answer(Done("list_topics_response", request.req_id, topics=topics.names()))
            case GetNextOffset():
                topic = topics.get(partition_label(request.topic, request.partition))
                following = topic.next_offset if topic is not None else 0
                command = "get_next_offset_response"
                self._answer(
                    Done(command, request.req_id, topic=request.topic, next_offset=following)
                )

    def _check(self, identity: Identity, request: Request) -> None:
        if identity.expires <= time.time():
            self._close_expired()
            raise Unauthorized("The token has expired")
        if isinstance(request, ProduceCommand | Create):
            identity.require(Role.READ_WRITE)

    def _close_expired(self) -> None:
        if self._transport is not None:
            self._transport.send_close(WSCloseCode.POLICY_VIOLATION, b"the token has expired")
            self._transport.disconnect()

    def _subscribe(self, request: Subscribe) -> None:
        label = partition_label(request.topic, request.partition)
        topic = self._server.topics.get(label)
        if topic is None:
            raise NotFound(f"Topic '{label}' not found for subscription.")
        position = start_position(topic, request.start_offset)
        old = self._watches.pop(label, None)
        if old is not None and old.subscription is not None:
            old.subscription.close()  # subscribing again moves the subscription
        watch = self._watches[label] = _Watch(self, label)
        self._done("subscribe_topic_response", request)
        watch.subscription = self._server.feeds.subscribe(topic, watch, position)

    async def _create(self, request: Create) -> None:
        topics, form = self._server.topics, request.format
        await topics.create(request.topic, form=form, partitions=request.partitions)
        self._done("create_topic_response", request)

    async def _create_and_produce(self, request: ProduceCommand, record: NewRecord) -> None:
        await self._server.topics.create(request.topic)
        topic = self._server.topics.partition(request.topic, request.partition)
        appended = await topic.append_records([record])
        self._produced(request, appended)

    def _produced(self, request: ProduceCommand, appended: Appended) -> None:
        topic, offset = request.topic, appended.first_offset
        self._answer(Done("produce_response", request.req_id, topic=topic, offset=offset))

    def _hold_for(self, work: Awaitable[None], request: Request) -> None:
        def finished(task: "asyncio.Future[None]") -> None:
            self._work = None
            if task.cancelled():
                return
            error = task.exception()
            if error is not None:
                self._fail(COMMANDS[type(request)], request.req_id, error)
            self._resume()
            self._close_if_done()

        self._work = asyncio.ensure_future(work)
        self._work.add_done_callback(finished)

    def _appended(
        self, request: ProduceCommand, size: int, future: "asyncio.Future[Appended]"
    ) -> None:
        self._in_flight -= size
        self._pending -= 1
        error = future.exception()
        if error is not None:
            self._fail("produce_request", request.req_id, error)
        else:
            self._produced(request, future.result())
        if not self._reading:
            self._resume()
        self._close_if_done()

    # Answers

    def send(self, data: bytes) -> bool:
        """Send a message. Return False if the client must read earlier messages first."""
        if self._transport is None:
            return False
        self._transport.send(TEXT, data)
        return self._writable

    def _answer(self, message: msgspec.Struct) -> None:
        self.send(messages.encode(message))

    def _done(self, command: str, request: Subscribe | Unsubscribe | Create) -> None:
        self._answer(Done(command, request.req_id, topic=request.topic))

    def _fail(self, command: str | None, req_id: ReqId, error: BaseException) -> None:
        if is_expected(error):
            text = str(error)
        else:
            log.error("a request failed unexpectedly", exc_info=error)
            text = "internal error; the server's log has the details"
        about, details = UNSET if command is None else command, details_of(error)
        self._answer(Failed("error_response", req_id, text, about, *astuple(details)))

    def topic_gone(self, watch: _Watch) -> None:
        if self._watches.get(watch.name) is watch:
            del self._watches[watch.name]
            error = NotFound(f"Topic '{watch.name}' was deleted.")
            self._fail("subscribe_topic_request", UNSET, error)

    def keep_alive(self) -> None:
        """Ping the client, and disconnect it if it is silent or its token has expired. Called every
        15 seconds.
        """
        if self._identity is not None and self._identity.expires <= time.time():
            self._close_expired()
        if self._transport is None or not self._writable:
            return
        self._silent += 1
        if self._silent > SILENT_PERIODS or self._is_trickling():
            self._transport.disconnect(graceful=False)
        else:
            self._transport.send_ping()

    def _is_trickling(self) -> bool:
        """Return whether a message in several frames arrives too slowly."""
        elapsed = self._loop.time() - self._parts_since - PART_SECONDS
        return bool(self._parts) and self._parts_size < elapsed * MIN_RATE

    def finish(self) -> None:
        """Run no further request. Close the connection when all open requests are answered."""
        self._ending = True
        self._inbox.clear()
        self._close_if_done()

    def _close_if_done(self) -> None:
        if (
            self._ending
            and not self._pending
            and self._work is None
            and self._transport is not None
        ):
            self._transport.send_close(WSCloseCode.GOING_AWAY, b"the server stops")
            self._transport.disconnect()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.disconnect(graceful=False)


def start_position(topic: AnyLog, start: int | str) -> int:
    if start == "latest":
        return topic.next_offset
    if start == "earliest":
        return topic.first_offset
    if not isinstance(start, int) or start < 0:
        raise InvalidRequest(f"start_offset is 0 or more, not {start!r}")
    return start
