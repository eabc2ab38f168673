"""A connection of the binary protocol: split the received bytes into requests and run them.

Adjacent PRODUCEs to one topic become one append. If this connection was also the last one that
appended, its appends are committed at the end of each read. Otherwise they are committed at the end
of the loop's tick, together with those of other connections.

A request that is not an append runs after all earlier appends are done. So a client that pipelines
reads its own writes, and a topic is created before a PRODUCE that follows.
"""

import logging
from collections.abc import Awaitable
from typing import Protocol, TypeAlias

from penstock.errors import TooLarge
from penstock.protocol import frames
from penstock.protocol.frames import REQUEST, Command
from penstock.protocol.status import TcpStatus, is_expected, status_of, tcp_details
from penstock.topics.store import AnyLog
from penstock.wire import framed
from penstock.wire.framed import FramedConnection, Pieces, Slot

log = logging.getLogger("penstock.tcp")

Answer: TypeAlias = Pieces | Awaitable[Pieces] | None

WAITING = (Command.FETCH, Command.GROUP_LEASE)
APPENDS = (Command.PRODUCE_BATCH, Command.PRODUCE_RECORDS)  # need not wait for appends before them
# A frame of up to so many times the limit is refused and read to its end. After a larger one, the
# connection is closed.
DISCARDED = 4


def failure(error: BaseException, *, produce: bool = False) -> bytes:
    """Encode an error as an answer. With `produce`, errors of the broker become PRODUCE_FAILED."""
    status = status_of(error).tcp
    if produce and status == TcpStatus.INTERNAL:
        status = TcpStatus.PRODUCE_FAILED
    if not is_expected(error):
        log.error("a request failed unexpectedly", exc_info=error)
        return frames.failure(status, "internal error; the server's log has the details")
    return frames.failure(status, str(error), tcp_details(error, status))


class TcpListener(framed.FrameListener, Protocol):
    last_producer: "TcpConnection | None"  # the connection that appended last


class TcpRequests(Protocol):
    """Run the requests of connections."""

    first_frame: int  # bytes of a frame before the client is authenticated
    max_frame: int

    def run(self, connection: "TcpConnection", command: int, body: memoryview) -> Answer: ...

    def produce(
        self, connection: "TcpConnection", data: bytes | bytearray, at: int, end: int
    ) -> int: ...


class TcpConnection(FramedConnection):
    head_size = REQUEST.size
    _server: TcpListener

    def __init__(self, server: TcpListener, commands: TcpRequests) -> None:
        super().__init__(server)
        self._commands = commands
        # It grows to the configured limit when the client is authenticated.
        self.max_frame = commands.first_frame
        self._appended_to: list[AnyLog] = []  # logs with appends of the present read

    def frame_size(self, data: bytes | bytearray) -> int:
        length: int = REQUEST.unpack_from(data)[1]
        return REQUEST.size + length

    def failure(self, error: BaseException) -> bytes:
        return failure(error)

    def append(self, slot: Slot, topic: AnyLog) -> Slot:
        """Add a slot, as `promise` does, and commit the topic at the end of the read."""
        if topic not in self._appended_to:
            self._appended_to.append(topic)
        return self.promise(slot)

    def take(self, data: bytes) -> None:
        """Run all complete requests in the received bytes, then commit their appends."""
        super().take(data)
        if not self._appended_to:
            return
        topics, self._appended_to = self._appended_to, []
        alone = self._server.last_producer is self
        self._server.last_producer = self
        for topic in topics:
            (topic.appends.commit if alone else topic.appends.schedule)()

    def run_frames(self, data: bytes | bytearray) -> int:
        """Run the complete requests at the start of `data`, until the connection is held. Return
        the number of bytes consumed.
        """
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
            if stop > end or self.held():
                break
            if command == Command.PRODUCE:
                at = commands.produce(self, data, at, end)
                continue
            if self._appends and command not in APPENDS:
                self._behind_appends = True
                break
            try:
                answer = commands.run(self, command, memoryview(data)[at + REQUEST.size : stop])
            except Exception as error:  # noqa: BLE001 - answered; the connection stays usable
                self.answer(failure(error))
            else:
                if answer is not None:
                    self.deliver(answer, waits=command in WAITING)
            at = stop
        return at

    def _refuse(self, command: int, length: int, missing: int) -> None:
        """Answer a frame that is too large, and skip the rest of it. If the connection were closed
        while the client is still sending, the client would lose the answer.
        """
        most = self.max_frame
        error = TooLarge(
            f"a frame of {length} bytes (command {command:#04x}) is larger than the limit of {most}"
        )
        self.answer(failure(error))
        # a client without a token, or bytes that are not a frame
        if most < self._commands.max_frame or length > DISCARDED * most:
            self.finish()
        else:
            self._discard = missing
