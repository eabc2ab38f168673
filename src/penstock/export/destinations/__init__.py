"""Where routes deliver to. A destination is one small class; the queue, retries and the rest are
not its affair.

It says which encoding and compression it takes (a batch is stored that way, so it is sent as it
lies on disk), turns a batch into what it sends (`prepare`, CPU work, may run in a pool) and sends
it. How a send failed decides what happens to the batch, so `send` raises one of four things, and
nothing else:

    Retry     not now: the destination is down, slow, or asks for patience
    Refused   never, as it is: the batch is cut in halves until the bad records stand alone
    TooBig    never, at this size: cut in halves
    Denied    not until a person has changed something (credentials, address): the route pauses
"""

from dataclasses import dataclass
from typing import Any, Protocol

from penstock.export.payload import NONE, compress, decompress, join, split


class Retry(Exception):
    """`kind` is the label of the metric: network, timeout, server_error, rate_limit, storage."""

    def __init__(self, kind: str, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.kind, self.retry_after = kind, retry_after


class Refused(Exception):
    pass


class TooBig(Exception):
    pass


class Denied(Exception):
    """`kind` is the label of the metric: auth, address."""

    def __init__(self, text: str, kind: str = "auth") -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(slots=True)
class Batch:
    """Records on their way. `key` is the same whenever these records are sent again."""

    key: str
    body: bytes
    records: int
    encoding: int
    compression: int

    def plain(self) -> bytes:
        return decompress(self.body, self.compression)

    def split(self) -> list[bytes]:
        return split(self.plain(), self.encoding)

    def compressed_as(self, compression: int) -> bytes:
        """The body in this compression: as stored if it is stored so."""
        if compression == self.compression:
            return self.body
        return compress(self.plain(), compression)

    def part(self, start: int, stop: int, key: str) -> "Batch":
        records = self.split()[start:stop]
        body = join(records, self.encoding)
        return Batch(
            key, compress(body, self.compression), stop - start, self.encoding, self.compression
        )


class Destination(Protocol):
    encoding: int  # how records lie in a batch (`payload`)
    compression: int | None  # how it likes them compressed; None = it does not care

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def prepare(self, batch: Batch) -> Any:
        """What `send` needs, computed without waiting for anything."""

    def is_cheap(self, batch: Batch) -> bool:
        """Whether preparing it is not worth a trip to the pool."""

    async def send(self, batch: Batch, prepared: Any) -> None:
        """Deliver; returns when the destination has it. Raises Retry, Refused, TooBig or Denied."""

    def describe(self) -> str:
        """One line for people, without secrets."""


CHEAP = 16 << 10


def cheap_to_open(batch: Batch) -> bool:
    return batch.compression == NONE or len(batch.body) < CHEAP
