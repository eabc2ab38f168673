"""A connection whose requests are frames: split the stream into frames and answer in order.

Frames are parsed in the buffer that came from the socket. Only an incomplete last frame is kept and
joined with what follows; a large one gets memory of its full size and is filled. All answers of one
turn of the event loop leave in one write.

An append is answered when it is durable, so several may be in flight; a queue of slots keeps their
answers in order. A request that waits runs to its end before the next one is parsed.

A connection pauses (it parses and reads nothing) while

- its appends in flight exceed `MAX_IN_FLIGHT_BYTES`,
- its unsent answers exceed the limit of the transport or `MAX_UNSENT_BYTES`: the client does not
  read,
- a waiting request is in flight.

So the cost of a connection is bounded, and a slow one delays only itself.

A protocol is a subclass. It knows the size of a frame (`frame_size`), runs whole frames
(`run_frames`) and encodes failures (`failure`).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import Any, Protocol, TypeAlias

from penstock.errors import InvalidRequest, Unavailable
from penstock.io.fs import Bytes
from penstock.wire.auth import Identity
from penstock.wire.request_memory import MIN_RATE, RETRY_AFTER_SECONDS, TOO_MANY, RequestMemory

Pieces: TypeAlias = list[Bytes]

MAX_IN_FLIGHT_BYTES = 16 << 20
MAX_UNSENT_BYTES = 4 << 20
HANDSHAKE = 0x16  # the first byte of a TLS client
LARGE = 64 << 10  # an incomplete frame above this is received into memory of its own
BACKLOG = 256 << 10  # read ahead while paused, to notice that a client disconnects


class Slot:
    """The place of one answer, or of a run of answers, in the order of the connection."""

    __slots__ = ("data", "weight")

    def __init__(self, weight: int = 0) -> None:
        self.data: Pieces | None = None  # None: not known yet
        self.weight = weight  # bytes of the append that waits for this answer; 0: not an append


class FrameListener(Protocol):
    """What all connections share: how many there may be, and what they count."""

    memory: RequestMemory
    bytes_in: int
    bytes_out: int

    def opened(self, connection: Any, /) -> bool: ...
    def lost(self, connection: Any, /) -> None: ...


class FramedConnection(asyncio.Protocol):
    head_size: int  # bytes that contain the size of a frame

    def __init__(self, server: FrameListener) -> None:
        self._server = server
        self.identity: Identity | None = None  # set after authentication
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport
        self._partial = b""  # an incomplete small frame
        self._large: bytearray | None = None  # an incomplete large frame, and how much has arrived
        self._large_filled = 0
        self._discard = 0  # bytes of a refused frame that have not arrived yet
        self._backlog: deque[bytes] = deque()  # read while paused
        self._backlog_bytes = 0
        self._slots: deque[Slot] = deque()
        self._appends = 0  # in flight, and the bytes of their requests
        self.in_flight = 0
        self._behind_appends = False  # the next request waits for the appends
        self._unsent = 0  # known answers that wait for an earlier one
        self._writing_paused = False
        self._reading_paused = False
        self._flushing = False
        # The request that blocks all later ones.
        self._work: asyncio.Future[Pieces] | None = None
        self._waits = False  # that request waits for records, not for the disk
        self._ending = False  # close once everything received is answered
        self._closing = False  # parse no further request
        self.seen = 0.0  # time of the last read or write, by the loop's clock
        self.opened = 0.0
        self._frame_since = 0.0  # when the incomplete frame began

    @property
    def who(self) -> str:
        """Return the subject of the token, or the client's address."""
        if self.identity is not None and self.identity.subject:
            return self.identity.subject
        peer = self.transport.get_extra_info("peername")
        return str(peer[0]) if peer else "unknown"

    # Implemented by a protocol

    def frame_size(self, data: bytes | bytearray) -> int:
        """Return the size of the first frame; `data` has at least `head_size` bytes."""
        raise NotImplementedError

    def run_frames(self, data: bytes | bytearray) -> int:
        """Run the whole requests at the start of `data` until paused; return the bytes consumed."""
        raise NotImplementedError

    def failure(self, error: BaseException) -> bytes:
        """Encode an error; empty if the protocol has no answer and the connection closes."""
        raise NotImplementedError

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
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
        """Answer what the client has sent, then close: it sends no more but may still read."""
        self._ending = True
        if self._waits and self._work is not None:
            # it waits for records that may never come, and the client has most likely gone
            self.transport.close()
        self._close_if_done()
        # keep the connection half open until all is answered; TLS cannot do this
        return self.transport.can_write_eof()

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
        if self._backlog or self.held():
            self._backlog.append(data)
            self._backlog_bytes += len(data)
        else:
            self.take(data)
        if self._slots or self._backlog or self._writing_paused or self._reading_paused:
            self._flush()
            self._adjust_reading()

    # Requests

    def held(self) -> bool:
        return (
            self._work is not None
            or self._behind_appends
            or self._writing_paused
            or self.in_flight > MAX_IN_FLIGHT_BYTES
            or self._unsent > MAX_UNSENT_BYTES
        )

    def _adjust_reading(self) -> None:
        pause = not self._closing and (
            self._backlog_bytes > BACKLOG or (self.held() and self._work is None)
        )
        if pause != self._reading_paused and not self.transport.is_closing():
            self._reading_paused = pause
            (self.transport.pause_reading if pause else self.transport.resume_reading)()

    def _resume(self) -> None:
        """Continue if nothing pauses the connection any more."""
        while self._backlog and not self.held() and not self._closing:
            data = self._backlog.popleft()
            self._backlog_bytes -= len(data)
            self.take(data)
        self._flush()
        self._adjust_reading()

    def take(self, data: bytes) -> None:
        """Join new bytes with the incomplete frame and run every whole request."""
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
            whole = self._take_large()
            done = self.run_frames(whole)
            data = data[missing:]
            if self.held():
                for waiting in (data, bytes(whole) if not done else b""):
                    if waiting:
                        self._backlog.appendleft(waiting)
                        self._backlog_bytes += len(waiting)
                return
            if not data:
                return
        elif self._partial:
            data, self._partial = self._partial + data, b""
            began = self._frame_since
        done = self.run_frames(data)
        if done == len(data) or self._closing:
            return
        rest = data[done:] if done else data
        self._frame_since = began if began and not done else self.seen
        if self.held():
            self._backlog.appendleft(rest)
            self._backlog_bytes += len(rest)
        elif len(rest) >= self.head_size and (total := self.frame_size(rest)) > LARGE:
            if rest[0] == HANDSHAKE:  # a TLS handshake; as a frame it would claim megabytes
                self.answer(self.failure(InvalidRequest("this port does not use TLS")))
                self.finish()
                return
            memory = self._server.memory
            if memory.total + total > memory.limit:
                self.answer(self.failure(Unavailable(TOO_MANY, RETRY_AFTER_SECONDS)))
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

    def deliver(self, answer: Pieces | Awaitable[Pieces], *, waits: bool) -> None:
        """Add the next answer. One that is not known yet blocks those behind it.

        `waits`: it waits for records, not for the disk.
        """
        if isinstance(answer, list):
            self.answer(*answer)
            return
        slot = Slot()
        self._slots.append(slot)
        self.hold_for(answer, slot)
        self._waits = waits

    # Answers

    def answer(self, *data: Bytes) -> None:
        """Add the next answer, which is already known."""
        slot = Slot()
        self._slots.append(slot)
        self.fill(slot, *data)

    def promise(self, slot: Slot) -> Slot:
        """Reserve the place of an append's answer; `fill` completes it."""
        self._slots.append(slot)
        self.in_flight += slot.weight
        self._appends += 1
        return slot

    def fill(self, slot: Slot, *data: Bytes) -> None:
        """Complete an answer. Answers of one turn leave together; the last one leaves at once."""
        slot.data = list(data)
        self._unsent += sum(map(len, data))
        if slot.weight:
            self.in_flight -= slot.weight
            self._appends -= 1
            self._behind_appends = self._behind_appends and self._appends > 0
            if not (self._appends or self._backlog or self._reading_paused):
                self._flush()
                return
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._end_of_turn)

    def hold_for(self, answer: Awaitable[Pieces], slot: Slot) -> None:
        """Pause until `answer` is known and has filled the slot."""

        def finished(task: "asyncio.Future[Pieces]") -> None:
            self._work = None
            if task.cancelled():
                return
            error = task.exception()
            self.fill(slot, *([self.failure(error)] if error is not None else task.result()))
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
        if not slots or slots[0].data is None or self.transport.is_closing():
            return
        ready: list[Bytes] = []
        while slots and slots[0].data is not None:
            ready += slots.popleft().data or ()
        size = sum(map(len, ready))
        self._unsent -= size
        self._server.bytes_out += size
        self.seen = self._loop.time()
        if len(ready) == 1:
            self.transport.write(ready[0])
        elif size > LARGE:
            self.transport.writelines(ready)
        else:
            self.transport.write(b"".join(ready))
        if self._ending:
            self._close_if_done()

    def finish(self) -> None:
        """Answer what is in flight, then close."""
        self._closing = self._ending = True
        self._backlog.clear()
        self._backlog_bytes = 0
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._ending and not self._slots and not self._backlog and self._work is None:
            self.transport.close()

    def finish_or_abort(self) -> None:
        """Close after everything in flight is answered; abort at the second call."""
        if self._closing:
            self.transport.abort()
        else:
            self.finish()

    def is_stalled(self, now: float, limit: float) -> bool:
        """Return True if a frame has begun to arrive and stopped, or arrives too slowly."""
        received = self._large_filled if self._large is not None else len(self._partial)
        if not received:
            return self._discard > 0 and not self._reading_paused and now - self.seen > limit
        if self._reading_paused or self.held():  # the broker pauses it, not the client
            self._frame_since = self.seen = now
            return False
        return now - self.seen > limit or received < (now - self._frame_since - limit) * MIN_RATE

    def abort(self) -> None:
        self.transport.abort()

    @property
    def idle(self) -> bool:
        """Return True if no request waits for an answer."""
        return not self._slots and self._work is None
