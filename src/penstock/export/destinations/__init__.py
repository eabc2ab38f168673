"""The destinations of routes, one per module, without send queues and retries.

A module has two classes. Its `Target`, registered with `@destination("<type>")`, has the keys and
checks of a definition and creates the destination. Its `Destination` names the encoding in which
batches are stored and sent, turns a batch into what it sends (`prepare`, CPU work, may run in a
pool), and sends it.

The error decides what happens to the batch, so `send` raises one of these four:

    RetryLater    the destination is down, slow, or asks for fewer requests: try again later
    BatchRefused  the data is bad: cut the batch in halves until the bad records are alone
    TooBig        the batch is too large: cut it in halves
    Denied        credentials or address are wrong: the route pauses
"""

import functools
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from penstock.config.schema import key
from penstock.export.checks import ca_from_api
from penstock.export.context import RouteContext
from penstock.export.payload import FRAMES, compress, decompress, join, split


class RetryLater(Exception):
    """The batch must be sent again later.

    `kind` is the label of the metric: network, timeout, server_error, rate_limit, storage.
    """

    def __init__(self, kind: str, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.kind, self.retry_after = kind, retry_after


class BatchRefused(Exception):
    """The batch has bad records.

    `undelivered` are the records that become dead letters if a part of a record was delivered;
    empty: the record itself.
    """

    def __init__(self, text: str, undelivered: Sequence[bytes] = ()) -> None:
        super().__init__(text)
        self.undelivered = undelivered


class TooBig(Exception):
    """The batch is too large for the destination."""


class Denied(Exception):
    """The destination refuses the route. `kind` is the label of the metric: auth, address."""

    def __init__(self, text: str, kind: str = "auth") -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(slots=True)
class OutgoingBatch:
    """Records to send. `key` is the same whenever these records are sent again."""

    key: str
    body: bytes
    records: int
    encoding: int
    compression: int
    whole: str = ""  # key of the block, if this is a part of one; "": it is a whole block
    first: int = 0  # index of its first record in the block

    def plain(self) -> bytes:
        return decompress(self.body, self.compression)

    def split(self) -> list[bytes]:
        return split(self.plain(), self.encoding)

    def part(self, start: int, stop: int) -> "OutgoingBatch":
        body = compress(join(self.split()[start:stop], self.encoding), self.compression)
        key = f"{self.key}-{start}-{stop - 1}"
        return OutgoingBatch(
            key, body, stop - start, self.encoding, self.compression, self.key, start
        )


class Destination(Protocol):
    encoding: int = FRAMES  # of the records in a batch (`payload`)

    async def stop(self) -> None:
        """Close connections, after the last `send`. They are opened by the first `send`, because
        the destination may be down when the route starts.
        """
        return

    def prepare(self, batch: OutgoingBatch) -> Any:
        """Return what `send` needs, without any I/O."""
        return batch.split()

    @abstractmethod
    async def send(self, batch: OutgoingBatch, prepared: Any) -> int | None:
        """Deliver the batch. Return when the destination has it, with the number of items in the
        records that it has rejected permanently. Raises RetryLater, BatchRefused, TooBig or Denied.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return one line for people, without secrets."""


@dataclass(frozen=True, kw_only=True)
class Target(ABC):
    """The `destination` of a definition. Problems begin with the key: "url is missing"."""

    needed: ClassVar[tuple[str, ...]] = ()  # keys that must not be empty
    takes_headers: ClassVar[bool] = False  # records come from `envelope.with_headers`
    takes_records: ClassVar[bool] = False  # records may come from `envelope.wrap_record`
    takes: ClassVar[str] = ""  # the telemetry source whose requests are its records; "": none

    type: str = key("", "which destination")

    def problems(self) -> list[str]:
        missing = [f"{word} is missing" for word in self.needed if not getattr(self, word)]
        return missing or self.checks()

    def checks(self) -> list[str]:
        """Return the problems of a target that has all needed keys."""
        return []

    def with_source(self, _topic: str, _queue: str) -> "Target":
        """Return the target for a route that reads this topic or queue ("" for none)."""
        return self

    def fills(self) -> tuple[str, str] | None:
        """Return ("topic" or "queue", name) if the target is one of this broker."""
        return None

    def from_api(self, certificates: Path, *, stored: bool) -> "Target":
        """Return the target of a definition that came over the API, or raise ConfigError when it
        names a file outside `certificates`. `stored`: it was accepted before, perhaps by an older
        version.
        """
        ca = ca_from_api(getattr(self, "ca", ""), certificates, stored=stored)
        return replace(self, ca=ca) if ca else self  # type: ignore[call-arg]

    @abstractmethod
    def make(self, context: RouteContext) -> Destination: ...


_targets: dict[str, type[Target]] = {}
T = TypeVar("T", bound=type[Target])


def destination(name: str) -> Callable[[T], T]:
    """Register a target under the `type` that definitions call it by."""

    def register(target: T) -> T:
        assert name not in _targets, f"there are two destinations of type {name}"
        _targets[name] = target
        return target

    return register


@functools.cache
def targets() -> Mapping[str, type[Target]]:
    """Return all targets by type. The modules of this package are discovered."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    return dict(sorted(_targets.items()))
