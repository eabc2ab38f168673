"""One connection of the binary protocol: cuts the byte stream into requests and puts the answers
back in their order.

What is read is parsed where it lies: frames are found in the bytes as they came from the socket and
only an incomplete last frame is kept and joined with what follows; one that is large gets memory of
its full size at once and is filled. Neighbouring PRODUCEs to one topic become one append, and all
answers of one turn of the event loop leave in one write.

What one read appended is committed at the end of the read when nobody else appends at the moment
(the read before that appended was this connection's too); otherwise at the end of the loop's turn,
together with what the others bring.

Appends are answered when they are durable, so several may be under way; a queue of slots keeps
their answers in order. Everything else is looked at when the appends before it are done and runs to
its end before the next request: a client that pipelines reads what it wrote, and a topic is created
before the PRODUCE behind it.

A connection is held (no request is looked at, and nothing more is read) while
- its appends under way exceed `MAX_IN_FLIGHT_BYTES`,
- its answers not yet taken by the socket exceed what the transport or `MAX_UNSENT_BYTES`
  allows: a client that does not read,
- a request that waits (FETCH and GROUP_LEASE with a wait, creating a topic) is under way.
So what one connection may cost is bounded, and a slow one holds back only itself.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable
from typing import Protocol, TypeAlias

from penstock.errors import InvalidRequest, TooLarge, Unavailable
from penstock.protocol import frames
from penstock.protocol.frames import REQUEST, Command
from penstock.protocol.status import TcpStatus, is_expected, status_of, tcp_details
from penstock.topics.topic import Topic
from penstock.wire.auth import Identity
from penstock.wire.request_memory import MIN_RATE, RETRY_SECONDS, TOO_MANY, RequestMemory

log = logging.getLogger("penstock.tcp")

Pieces: TypeAlias = list[frames.Bytes]
Answer: TypeAlias = Pieces | Awaitable[Pieces] | None

MAX_IN_FLIGHT_BYTES = 16 << 20
MAX_UNSENT_BYTES = 4 << 20
WAITING = (Command.FETCH, Command.GROUP_LEASE)
HANDSHAKE = 0x16  # the first byte of a client that speaks TLS
LARGE = 64 << 10  # an incomplete frame above this is received into memory of its own
# a frame of up to so many times the limit is refused and read to its end; after a larger one we
# close
DISCARDED = 4
BACKLOG = 256 << 10  # read ahead while held, so that a client that leaves is noticed


class Slot:
    """The place of one answer (or of one run of answers) in the order of the connection."""

    __slots__ = ("data", "weight")

    def __init__(self, weight: int = 0) -> None:
        self.data: list[frames.Bytes] | None = None  # None: not known yet
        self.weight = weight  # bytes of the append that waits for this answer; 0: no append


def failure(error: BaseException, *, produce: bool = False) -> bytes:
    """The answer that says what went wrong; `produce`: what is not the request's fault is
    PRODUCE_FAILED.
    """
    status = status_of(error).tcp
    if produce and status == TcpStatus.INTERNAL:
        status = TcpStatus.PRODUCE_FAILED
    if not is_expected(error):
        log.error("a request failed unexpectedly", exc_info=error)
        return frames.failure(status, "internal error; the server's log has the details")
    return frames.failure(status, str(error), tcp_details(error, status))


class Listener(Protocol):
    """What all connections share: how many there may be, and what they count."""

    memory: RequestMemory
    last_producer: "Connection | None"  # whose read appended last
    bytes_in: int
    bytes_out: int

    def opened(self, connection: "Connection") -> bool: ...
    def lost(self, connection: "Connection") -> None: ...


class Requests(Protocol):
    """Runs the requests that a connection cuts out of its bytes."""

    first_frame: int  # bytes that a client may send before it is known
    max_frame: int

    def run(self, connection: "Connection", command: int, body: memoryview) -> Answer: ...

    def produce(
        self, connection: "Connection", data: bytes | bytearray, at: int, end: int
    ) -> int: ...


class Connection(asyncio.Protocol):
    def __init__(self, server: Listener, commands: Requests) -> None:
        self._server = server
        self._commands = commands
        # Grows to the configured limit when we know who it is.
        self.max_frame = commands.first_frame
        self.identity: Identity | None = None  # who it is, when commands ask for it
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._partial = b""  # an incomplete small frame
        self._large: bytearray | None = None  # an incomplete large one, and how much of it has come
        self._large_filled = 0
        self._discard = 0  # bytes that are still to come of a frame that was refused
        self._backlog: deque[bytes] = deque()  # read, but held
        self._backlog_bytes = 0
        self._slots: deque[Slot] = deque()
        self._appends = 0  # under way, and the bytes of their requests
        self._in_flight = 0
        self._behind_appends = False  # the next request waits for them
        self._appended_to: list[Topic] = []  # by what is being read, not committed yet
        self._unsent = 0  # answers that are known but wait for one before them
        self._writing_paused = False
        self._reading_paused = False
        self._flushing = False
        # The request that everything behind it waits for.
        self._work: asyncio.Future[Pieces] | None = None
        self._waits = False  # that request waits for records, not for the disk
        self._ending = False  # close once everything that came is answered
        self._closing = False  # look at no further request
        self.seen = 0.0  # when something last came or went, by the loop's clock
        self.opened = 0.0
        self._frame_since = 0.0  # when the incomplete frame began

    @property
    def who(self) -> str:
        """The token's subject, else the client's address."""
        if self.identity is not None and self.identity.subject:
            return self.identity.subject
        peer = self._transport.get_extra_info("peername")
        return str(peer[0]) if peer else "unknown"

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.seen = self.opened = self._loop.time()
        if not self._server.opened(self):
            transport.close()
            self._closing = True

    def connection_lost(self, _: Exception | None) -> None:
        self._closing = True
        self._backlog.clear()
        self._slots.clear()
        self._take_large()
        self._partial = b""
        if self._work is not None:
            self._work.cancel()
        self._server.lost(self)

    def eof_received(self) -> bool:
        """The client sends no more but may still read: what it has sent is answered, then the
        connection closes.
        """
        self._ending = True
        if self._waits and self._work is not None:
            # it waits for records that may never come, and most likely the client is gone
            self._transport.close()
        self._close_if_done()
        # keep our half open until all is answered; TLS cannot
        return self._transport.can_write_eof()

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._resume()

    def data_received(self, data: bytes) -> None:
        self.seen = self._loop.time()
        self._server.bytes_in += len(data)
        if self._closing:
            return
        if self._backlog or self._held():
            self._backlog.append(data)
            self._backlog_bytes += len(data)
        else:
            self._take(data)
            self._flush()
        self._adjust_reading()

    # Requests

    def _held(self) -> bool:
        return (
            self._work is not None
            or self._behind_appends
            or self._writing_paused
            or self._in_flight > MAX_IN_FLIGHT_BYTES
            or self._unsent > MAX_UNSENT_BYTES
        )

    def _adjust_reading(self) -> None:
        pause = not self._closing and (
            self._backlog_bytes > BACKLOG or (self._held() and self._work is None)
        )
        if pause != self._reading_paused and not self._transport.is_closing():
            self._reading_paused = pause
            (self._transport.pause_reading if pause else self._transport.resume_reading)()

    def _resume(self) -> None:
        """Something that may have held us has changed."""
        while self._backlog and not self._held() and not self._closing:
            data = self._backlog.popleft()
            self._backlog_bytes -= len(data)
            self._take(data)
        self._flush()
        self._adjust_reading()

    def _take(self, data: bytes) -> None:
        """Run every whole request in what came, then have what it appended committed."""
        self._join_and_run(data)
        if not self._appended_to:
            return
        topics, self._appended_to = self._appended_to, []
        alone = self._server.last_producer is self
        self._server.last_producer = self
        for topic in topics:
            if alone:
                topic.appends.commit()
            else:
                topic.appends.schedule()

    def _join_and_run(self, data: bytes) -> None:
        """Join what came with what was incomplete, and run every whole request in it."""
        if self._discard:
            came = min(self._discard, len(data))
            self._discard -= came
            if came == len(data):
                return
            data = data[came:]
        began = 0.0
        if self._large is not None:
            missing = len(self._large) - self._large_filled
            got = min(missing, len(data))
            self._large[self._large_filled : self._large_filled + got] = data[:got]
            self._large_filled += got
            if got < missing:
                return
            self._run(self._take_large())
            if len(data) == missing:
                return
            data = data[missing:]
            if self._held():
                self._backlog.appendleft(data)
                self._backlog_bytes += len(data)
                return
        elif self._partial:
            data, self._partial = self._partial + data, b""
            began = self._frame_since
        done = self._run(data)
        if done == len(data) or self._closing:
            return
        rest = data[done:] if done else data
        self._frame_since = began if began and not done else self.seen
        if self._held():
            self._backlog.appendleft(rest)
            self._backlog_bytes += len(rest)
        elif (
            len(rest) >= REQUEST.size
            and (total := REQUEST.size + REQUEST.unpack_from(rest)[1]) > LARGE
        ):
            if rest[0] == HANDSHAKE:  # no command; its length would have us wait for megabytes
                self.answer(failure(InvalidRequest("there is no TLS on this port")))
                self.finish()
                return
            memory = self._server.memory
            if memory.total + total > memory.limit:
                self.answer(failure(Unavailable(TOO_MANY, RETRY_SECONDS)))
                self.finish()
                return
            memory.total += total
            self._large = bytearray(total)
            self._large[: len(rest)] = rest
            self._large_filled = len(rest)
        else:
            self._partial = rest

    def _take_large(self) -> bytearray:
        whole, self._large = self._large or bytearray(), None
        self._server.memory.total -= len(whole)
        return whole

    def _run(self, data: bytes | bytearray) -> int:
        """Run the whole requests at the beginning of `data`, until held; the bytes that took."""
        at, end = 0, len(data)
        commands = self._commands
        most = self.max_frame
        while end - at >= REQUEST.size:
            command, length = REQUEST.unpack_from(data, at)
            stop = at + REQUEST.size + length
            if length > most:
                self._refuse(command, length, max(0, stop - end))
                at = min(stop, end)
                if self._closing or self._discard:
                    return end
                continue
            if stop > end or self._held():
                break
            if command == Command.PRODUCE:
                at = commands.produce(self, data, at, end)
                continue
            if self._appends and command != Command.PRODUCE_BATCH:
                self._behind_appends = True
                break
            try:
                answer = commands.run(self, command, memoryview(data)[at + REQUEST.size : stop])
            except Exception as error:  # noqa: BLE001 - one bad request is answered, it stays usable
                self.answer(failure(error))
            else:
                if answer is not None:
                    self._deliver(answer, command in WAITING)
            at = stop
        return at

    def _deliver(self, answer: Pieces | Awaitable[Pieces], waits: bool) -> None:
        if isinstance(answer, list):
            self.answer(*answer)
            return
        slot = Slot()
        self._slots.append(slot)
        self.hold_for(answer, slot)
        self._waits = waits

    def _refuse(self, command: int, length: int, missing: int) -> None:
        """Answer a frame that is too large and pass over the rest of it: closing while the client
        still sends would take the answer away from it."""
        most = self.max_frame
        error = TooLarge(
            f"a frame of {length} bytes (command {command:#04x}) is larger than the limit of {most}"
        )
        self.answer(failure(error))
        # a stranger, or no frame at all
        if most < self._commands.max_frame or length > DISCARDED * most:
            self.finish()
        else:
            self._discard = missing

    # Answers

    def answer(self, *data: frames.Bytes) -> None:
        """The next answer, known at once."""
        slot = Slot()
        self._slots.append(slot)
        self.fill(slot, *data)

    def promise(self, slot: Slot, topic: Topic | None = None) -> Slot:
        """The place of an append's answer; fill it when it is known. `topic`: is to be committed at
        the end of the read.
        """
        self._slots.append(slot)
        self._in_flight += slot.weight
        self._appends += 1
        if topic is not None and topic not in self._appended_to:
            self._appended_to.append(topic)
        return slot

    def fill(self, slot: Slot, *data: frames.Bytes) -> None:
        """Its answer is known. All of one turn leave together; but behind the last append under way
        nothing is gained by waiting for more.
        """
        slot.data = list(data)
        self._unsent += sum(map(len, data))
        if slot.weight:
            self._in_flight -= slot.weight
            self._appends -= 1
            self._behind_appends = self._behind_appends and self._appends > 0
            if not (self._appends or self._backlog or self._reading_paused):
                self._flush()
                return
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._end_of_turn)

    def hold_for(self, answer: Awaitable[Pieces], slot: Slot) -> None:
        """Look at no further request until `answer` is known, and has filled the slot."""

        def finished(task: "asyncio.Future[Pieces]") -> None:
            self._work = None
            if task.cancelled():
                return
            error = task.exception()
            self.fill(slot, *([failure(error)] if error is not None else task.result()))
            self._resume()

        work = asyncio.ensure_future(answer)
        self._waits = False
        self._work = work
        work.add_done_callback(finished)

    def _end_of_turn(self) -> None:
        self._flushing = False
        self._resume()

    def _flush(self) -> None:
        slots = self._slots
        if not slots or slots[0].data is None or self._transport.is_closing():
            return
        ready: list[frames.Bytes] = []
        while slots and slots[0].data is not None:
            ready += slots.popleft().data or ()
        size = sum(map(len, ready))
        self._unsent -= size
        self._server.bytes_out += size
        self.seen = self._loop.time()
        if len(ready) == 1:
            self._transport.write(ready[0])
        elif size > LARGE:
            self._transport.writelines(ready)
        else:
            self._transport.write(b"".join(ready))
        if self._ending:
            self._close_if_done()

    def finish(self) -> None:
        """Answer what is under way, then close."""
        self._closing = self._ending = True
        self._backlog.clear()
        self._backlog_bytes = 0
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._ending and not self._slots and not self._backlog and self._work is None:
            self._transport.close()

    def finish_or_abort(self) -> None:
        """Close after what is under way is answered; when that was asked for before, the client
        does not read: cut.
        """
        if self._closing:
            self._transport.abort()
        else:
            self.finish()

    def is_stalled(self, now: float, limit: float) -> bool:
        """A frame has begun to arrive and does not go on, or arrives too slowly to ever end."""
        received = self._large_filled if self._large is not None else len(self._partial)
        if not received:
            return self._discard > 0 and not self._reading_paused and now - self.seen > limit
        if self._reading_paused or self._held():  # we hold it back, not the client
            self._frame_since = self.seen = now
            return False
        return now - self.seen > limit or received < (now - self._frame_since - limit) * MIN_RATE

    def abort(self) -> None:
        self._transport.abort()

    @property
    def idle(self) -> bool:
        """Nothing is under way: no request waits for an answer."""
        return not self._slots and self._work is None
