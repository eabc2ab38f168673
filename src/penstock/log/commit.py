"""Assemble a commit: assign offsets and positions to the queued appends, and encode them.

Adjacent appends of payloads without a producer share one frame. An append with a producer has its
own, which identifies it when it is sent again. Repeated and out-of-order batches are sorted out
here and cost no write. If a commit contains a batch of a producer, and a later batch neither
follows nor repeats it, the commit ends before the later batch. Only the next commit can tell
whether that one is stored already.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import Conflict, PenstockError
from penstock.io.fs import Bytes
from penstock.log.format import Content, SegmentFormat
from penstock.log.producers import AnyProducer, Producers
from penstock.log.segment import Write

MAX_SHARED_BYTES = 1 << 20  # of a frame of several appends: Kafka's clients read whole frames


@dataclass(slots=True)
class Appended:
    first_offset: int
    count: int
    duplicate: bool


class Promise(Protocol):
    """The receiver of an append's result: an `asyncio.Future`, or an object that handles the result
    at once, without a further tick of the loop. Its methods must not raise.
    """

    def done(self) -> bool: ...

    def set_result(self, result: Appended, /) -> None: ...

    def set_exception(self, exception: PenstockError, /) -> None: ...


class Entry:
    """A queued append."""

    __slots__ = ("content", "count", "first", "first_copy", "producer", "promise", "size")

    def __init__(
        self,
        content: Content,
        count: int,
        size: int,
        producer: AnyProducer | None,
        promise: Promise,
    ) -> None:
        self.content = content
        self.count = count
        self.size = size  # bytes of its records, approximately
        self.producer = producer
        self.promise = promise
        self.first = -1  # its first offset, once it is part of a commit
        self.first_copy: Entry | None = None  # the same batch, earlier in the same commit

    def answer(self, appended: Appended) -> None:
        if not self.promise.done():
            self.promise.set_result(appended)

    def refuse(self, error: PenstockError) -> None:
        if not self.promise.done():
            self.promise.set_exception(type(error)(str(error)))


class LogCommit:
    """A commit: the appends that it takes from the front of a list, and their encoded bytes."""

    __slots__ = (
        "_format",
        "_latest",
        "_producers",
        "_seen",
        "duplicates",
        "entries",
        "write",
    )

    def __init__(
        self,
        format: SegmentFormat,
        entries: Sequence[Entry],
        write: Write,
        producers: Producers,
    ) -> None:
        self.entries = entries
        self.write = write
        self.duplicates = 0
        self._format = format
        self._producers = producers
        self._seen: dict[AnyProducer, Entry] = {}  # batches of producers in this commit
        self._latest: dict[bytes, AnyProducer] = {}  # the last batch of each producer, by key
        alike: list[Entry] = []
        shared = 0
        for number, entry in enumerate(entries):
            if entry.producer is None and type(entry.content) is list:
                if shared and shared + entry.size > MAX_SHARED_BYTES:
                    self._add_alike(alike)
                    alike, shared = [], 0
                alike.append(entry)
                shared += entry.size
                continue
            if entry.producer is not None:
                if self._jumps(entry.producer):
                    self.entries = entries[:number]
                    break
                if self._is_old(entry, entry.producer):
                    continue
            self._add_alike(alike)
            alike, shared = [], 0
            entry.first = self.write.first + self.write.count
            format.add(self.write, entry.content, entry.producer)
        self._add_alike(alike)

    def _add_alike(self, alike: list[Entry]) -> None:
        if not alike:
            return
        payloads: list[Bytes] = alike[0].content  # type: ignore[assignment]
        first = alike[0].first = self.write.first + self.write.count
        if len(alike) > 1:
            payloads = list(payloads)
            for entry in alike[1:]:
                entry.first = first + len(payloads)
                payloads.extend(entry.content)  # type: ignore[arg-type]
        self._format.add(self.write, payloads, None)

    def _jumps(self, producer: AnyProducer) -> bool:
        """Return whether this commit has a batch of the same producer that this one neither follows
        nor repeats.
        """
        latest = self._latest.get(producer.key)
        return not (latest is None or producer in self._seen or producer.follows(latest))

    def _is_old(self, entry: Entry, producer: AnyProducer) -> bool:
        """Return whether this append needs no write: it is stored already, repeated in this commit,
        or out of order.
        """
        first_copy = self._seen.get(producer)
        if first_copy is not None:
            entry.first_copy = first_copy
            return True
        if producer.key not in self._latest:
            try:
                earlier = self._producers.earlier(producer)
            except Conflict as error:
                entry.refuse(error)
                return True
            if earlier is not None:
                self.duplicates += 1
                entry.answer(Appended(*earlier, True))
                return True
        self._seen[producer] = entry
        self._latest[producer.key] = producer
        return False

    def succeed(self) -> None:
        """Answer all appends, and remember their producers."""
        for entry in self.entries:
            if entry.first >= 0:
                if entry.producer is not None:
                    self._producers.add(entry.producer, entry.first, entry.count, self.write.time)
                promise = entry.promise
                if not promise.done():
                    promise.set_result(Appended(entry.first, entry.count, False))
            elif entry.first_copy is not None:
                entry.answer(Appended(entry.first_copy.first, entry.first_copy.count, True))
