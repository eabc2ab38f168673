"""Putting a commit together: offsets, positions, checksums and sidecar rows for everything that
waits.

Neighbouring appends without a producer share one sidecar row; an append with a producer has its
own, since the row is what recognises it when it is sent again. Repeated and out-of-order batches
drop out here and cost no write.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from crc32c import crc32c

from penstock.errors import Conflict, PenstockError
from penstock.io.fs import Bytes
from penstock.log.encode import Frame, frame_arrays, frame_payloads, frame_table
from penstock.log.layout import HAS_PRODUCER, HEADER_SIZE, NO_PRODUCER, BatchRow
from penstock.log.producers import Producer, Producers
from penstock.log.writer import Write


@dataclass(slots=True)
class Appended:
    first_offset: int
    count: int
    duplicate: bool


class Promise(Protocol):
    """Where the answer to an append goes: an `asyncio.Future`, or something that takes it at once,
    on the loop, and saves the trip through the loop's queue. It must not raise."""

    def done(self) -> bool: ...

    def set_result(self, result: Appended, /) -> None: ...

    def set_exception(self, exception: PenstockError, /) -> None: ...


class Entry:
    """One append on its way."""

    __slots__ = (
        "count",
        "first",
        "is_list",
        "lengths",
        "payloads",
        "producer",
        "promise",
        "size",
        "twin",
    )

    def __init__(
        self,
        payloads: Sequence[Bytes] | np.ndarray,
        lengths: np.ndarray | None,
        count: int,
        size: int,
        producer: Producer | None,
        promise: Promise,
    ) -> None:
        # with `lengths`: a single buffer that holds them all; an array: payloads of one length
        self.payloads = payloads
        self.lengths = lengths
        self.is_list = lengths is None and not isinstance(payloads, np.ndarray)
        self.count = count
        self.size = size + HEADER_SIZE * count  # as records
        self.producer = producer
        self.promise = promise
        self.first = -1  # its first offset, once it is part of a commit
        self.twin: Entry | None = None  # the same batch, earlier in the same commit

    def frame(self, position: int) -> Frame:
        if isinstance(self.payloads, np.ndarray):
            return frame_table(self.payloads, self.first, position)
        if self.lengths is None:
            return frame_payloads(self.payloads, self.first, position)
        return frame_arrays(self.lengths, memoryview(self.payloads[0]), self.first, position)

    def answer(self, appended: Appended) -> None:
        if not self.promise.done():
            self.promise.set_result(appended)

    def refuse(self, error: PenstockError) -> None:
        if not self.promise.done():
            self.promise.set_exception(type(error)(str(error)))


class Commit:
    """What one write holds: the appends, and the bytes they become."""

    __slots__ = ("_offset", "_position", "_producers", "_seen", "duplicates", "entries", "write")

    def __init__(
        self, entries: Sequence[Entry], first: int, position: int, time: int, producers: Producers
    ) -> None:
        self.entries = entries
        self.write = Write(first, time=time)
        self.duplicates = 0
        self._offset, self._position = first, position  # of what comes next in the active segment
        self._producers = producers
        self._seen: dict[Producer, Entry] = {}  # batches of producers in this very commit
        alike: list[Entry] = []
        for entry in entries:
            if entry.producer is None and entry.is_list:
                alike.append(entry)
                continue
            if entry.producer is not None and self._is_old(entry, entry.producer):
                continue
            self._add_alike(alike)
            alike = []
            entry.first = self._offset
            self._add(entry.frame(self._position), entry.producer)
        self._add_alike(alike)

    def _add_alike(self, alike: list[Entry]) -> None:
        if not alike:
            return
        payloads: Sequence[Bytes] = alike[0].payloads  # type: ignore[assignment]
        alike[0].first = self._offset
        if len(alike) > 1:
            payloads = list(payloads)
            for entry in alike[1:]:
                entry.first = self._offset + len(payloads)
                payloads.extend(entry.payloads)
        self._add(frame_payloads(payloads, self._offset, self._position), None)

    def _is_old(self, entry: Entry, producer: Producer) -> bool:
        """Whether this append needs no write: stored already, twice in here, or out of order."""
        twin = self._seen.get(producer)
        if twin is not None:
            entry.twin = twin
            return True
        if Producer(producer.id, producer.sequence - 1) not in self._seen:  # not the next one
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
        return False

    def _add(self, frame: Frame, producer: Producer | None) -> None:
        write, size, start = self.write, len(frame.data), self._position
        write.batches.append(
            BatchRow(
                first=self._offset,
                records=frame.count,
                flags=0 if producer is None else HAS_PRODUCER,
                start=start,
                end=start + size,
                time=write.time,
                producer=NO_PRODUCER if producer is None else producer.id,
                sequence=0 if producer is None else producer.sequence,
                crc=crc32c(frame.data),
            ).pack()
        )
        write.data.append(frame.data)
        write.index.append(frame.index)
        write.count += frame.count
        write.size += size
        self._offset += frame.count
        self._position += size

    def succeed(self) -> None:
        """Answer everything; producers are remembered from here on."""
        for entry in self.entries:
            if entry.first >= 0:
                if entry.producer is not None:
                    self._producers.add(entry.producer, entry.first, entry.count, self.write.time)
                entry.answer(Appended(entry.first, entry.count, False))
            elif entry.twin is not None:
                entry.answer(Appended(entry.twin.first, entry.twin.count, True))
