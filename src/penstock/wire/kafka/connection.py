"""One connection of a Kafka client: finds the requests in the frames that come and answers in their
order.

Produce requests are under way together; each of the others runs to its end before the next request
is looked at, as in Kafka. What cannot be read ends the connection: Kafka has no error for it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeAlias

from penstock.errors import PenstockError, TooLarge
from penstock.wire.framed import FramedConnection, FrameListener, Pieces
from penstock.wire.kafka.codec import LENGTH, KafkaHead, Values, encode_answer

log = logging.getLogger("penstock.kafka")

WAITING = (1, 11, 14)  # Fetch, JoinGroup, SyncGroup: they wait for records or other members


class KafkaRequest(NamedTuple):
    head: KafkaHead
    client: str  # its id
    body: Any  # its fields are attributes


Answer: TypeAlias = Values | Awaitable[Values] | None


class KafkaConnection(FramedConnection):
    head_size = LENGTH.size

    def __init__(
        self,
        server: FrameListener,
        run: "Callable[[KafkaConnection, KafkaHead, memoryview], Answer]",
        max_frame: int,
    ) -> None:
        """`run` is called with each request. `max_frame` grows when the client is known."""
        super().__init__(server)
        self._run_request = run
        self.max_frame = max_frame
        self.mechanism: str | None = None  # of SASL, which the next token comes by

    @property
    def host(self) -> str:
        peer = self.transport.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    @property
    def local_address(self) -> tuple[str, int]:
        """Return the address that the client has connected to."""
        host, port, *_ = self.transport.get_extra_info("sockname")
        return str(host), int(port)

    def frame_size(self, data: bytes | bytearray) -> int:
        length: int = LENGTH.unpack_from(data)[0]
        return LENGTH.size + length

    def failure(self, error: BaseException) -> bytes:
        log.info("the connection of %s is closed: %s", self.who, error)
        return b""

    def run_frames(self, data: bytes | bytearray) -> int:
        at, end = 0, len(data)
        view = memoryview(data)
        while end - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data, at)
            if not 0 <= length <= self.max_frame:
                self.end(TooLarge(f"a frame of {length} bytes; {self.max_frame} are allowed"))
                return end
            stop = at + LENGTH.size + length
            if stop > end or self.held():
                break
            self._run(view[at + LENGTH.size : stop])
            if self._closing:
                return end
            at = stop
        return at

    def _run(self, frame: memoryview) -> None:
        try:
            head = KafkaHead.parse(frame)
            answer = self._run_request(self, head, frame)
        except PenstockError as error:
            self.end(error)
            return
        if answer is None:  # a produce, which has its place in the order by itself
            return
        if isinstance(answer, Awaitable):
            self.deliver(self._encoded(head, answer), waits=head.key in WAITING)
        else:
            self.reply(head, answer)

    def reply(self, head: KafkaHead, answer: Values) -> None:
        """Add the next answer."""
        self.answer(*encode_answer(head, answer))

    async def _encoded(self, head: KafkaHead, answer: Awaitable[Values]) -> Pieces:
        try:
            return encode_answer(head, await answer)
        except asyncio.CancelledError:
            raise
        except PenstockError as error:
            self.end(error)
        except Exception as error:
            log.error("a request failed unexpectedly", exc_info=error)
            self.finish()
        return []

    def finish_after_answer(self) -> None:
        """Look at no further request; close when the answer to this one has left."""
        self._closing = self._ending = True

    def end(self, error: PenstockError) -> None:
        """Answer what is under way, then close, because of this."""
        self.failure(error)
        self.finish()
