"""A connection whose requests are frames: it cuts the byte stream into frames and puts the answers
back in their order.

What is read is parsed where it lies: frames are found in the bytes as they came from the socket and
only an incomplete last frame is kept and joined with what follows; one that is large gets memory of
its full size at once and is filled. All answers of one turn of the event loop leave in one write.

Appends are answered when they are durable, so several may be under way; a queue of slots keeps
their answers in order. A request that waits runs to its end before the next one is looked at.

A connection is held (no request is looked at, and nothing more is read) while
- its appends under way exceed `MAX_IN_FLIGHT_BYTES`,
- its answers not yet taken by the socket exceed what the transport or `MAX_UNSENT_BYTES`
  allows: a client that does not read,
- a request that waits is under way.
So what one connection may cost is bounded, and a slow one holds back only itself.

A protocol is a subclass: it says how large a frame is (`frame_size`), runs those that are whole
(`run_frames`) and has an answer for what goes wrong (`failure`).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import Any, Protocol, TypeAlias

from penstock.errors import InvalidRequest, Unavailable
from penstock.io.fs import Bytes
from penstock.wire.auth import Identity
from penstock.wire.request_memory import MIN_RATE, RETRY_SECONDS, TOO_MANY, RequestMemory

Pieces: TypeAlias = list[Bytes]

MAX_IN_FLIGHT_BYTES = 16 << 20
MAX_UNSENT_BYTES = 4 << 20
HANDSHAKE = 0x16  # the first byte of a client that speaks TLS
LARGE = 64 << 10  # an incomplete frame above this is received into memory of its own
BACKLOG = 256 << 10  # read ahead while held, so that a client that leaves is noticed


class Slot:
    """The place of one answer (or of one run of answers) in the order of the connection."""

    __slots__ = ("data", "weight")

    def __init__(self, weight: int = 0) -> None:
        self.data: Pieces | None = None  # None: not known yet
        self.weight = weight  # bytes of the append that waits for this answer; 0: no append


class Listener(Protocol):
    """What all connections share: how many there may be, and what they count."""

    memory: RequestMemory
    bytes_in: int
    bytes_out: int

    def opened(self, connection: Any, /) -> bool: ...
    def lost(self, connection: Any, /) -> None: ...


class FramedConnection(asyncio.Protocol):
    head_size: int  # bytes of a frame that say how large it is

    def __init__(self, server: Listener) -> None:
        self._server = server
        self.identity: Identity | None = None  # who it is, where tokens are asked for
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

    # What a protocol says

    def frame_size(self, data: bytes | bytearray) -> int:
        """How large the frame is that `data` begins with; at least `head_size` bytes are there."""
        raise NotImplementedError

    def run_frames(self, data: bytes | bytearray) -> int:
        """Run the whole requests at the beginning of `data`, until held; the bytes that took."""
        raise NotImplementedError

    def failure(self, error: BaseException) -> bytes:
        """The answer that says what went wrong; empty: there is none, the connection closes."""
        raise NotImplementedError

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
            self.take(data)
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
            self.take(data)
        self._flush()
        self._adjust_reading()

    def take(self, data: bytes) -> None:
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
            whole = self._take_large()
            done = self.run_frames(whole)
            data = data[missing:]
            if self._held():
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
        if self._held():
            self._backlog.appendleft(rest)
            self._backlog_bytes += len(rest)
        elif len(rest) >= self.head_size and (total := self.frame_size(rest)) > LARGE:
            if rest[0] == HANDSHAKE:  # no command; its length would have us wait for megabytes
                self.answer(self.failure(InvalidRequest("there is no TLS on this port")))
                self.finish()
                return
            memory = self._server.memory
            if memory.total + total > memory.limit:
                self.answer(self.failure(Unavailable(TOO_MANY, RETRY_SECONDS)))
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
        """The next answer; one that is not known yet holds what is behind it. `waits`: for records,
        not for the disk.
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
        """The next answer, known at once."""
        slot = Slot()
        self._slots.append(slot)
        self.fill(slot, *data)

    def promise(self, slot: Slot) -> Slot:
        """The place of an append's answer; fill it when it is known."""
        self._slots.append(slot)
        self._in_flight += slot.weight
        self._appends += 1
        return slot

    def fill(self, slot: Slot, *data: Bytes) -> None:
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
        if not slots or slots[0].data is None or self._transport.is_closing():
            return
        ready: list[Bytes] = []
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
