"""Idempotence: which batches of which producers are in the log already.

A producer numbers its batches 0, 1, 2, ...; the last `BATCHES_REMEMBERED` of each are kept with
where they went. A batch sent again is answered with its first offsets, a batch that skips one is
refused, so a producer that pipelines and retries gets its records stored once and in order. An
unknown producer may start anywhere (its history may have expired). Sequences from `SPARSE` on may
leave gaps and only have to grow: they are for those who number something larger than a batch, as a
Spark query numbers its epochs. One that is behind the last and no longer remembered counts as
stored; where it went is then unknown, and its answer says 0 records.

The table is derived from the sidecar; the checkpoint carries a copy so that a restart reads only
the rows after it. It is asked when a commit is put together, at which moment nothing of this topic
is in flight.
"""

from typing import NamedTuple

import numpy as np

from penstock.errors import Conflict
from penstock.log.layout import HAS_PRODUCER, ProducerEntry
from penstock.protocol.frames import SPARSE

BATCHES_REMEMBERED = 128


class Producer(NamedTuple):
    """Who appends, and the number of this batch: `id` is 16 bytes and `sequence` counts batches."""

    id: bytes
    sequence: int


class Producers:
    __slots__ = ("_expiry", "entries")

    def __init__(self, entries: dict[bytes, ProducerEntry], expiry: float) -> None:
        self.entries = entries
        self._expiry = int(expiry * 1e6)

    def earlier(self, producer: Producer) -> tuple[int, int] | None:
        """Where this batch went before; None when it is the next one; Conflict otherwise."""
        entry = self.entries.get(producer.id)
        if entry is None:
            return None
        earlier = entry.batches.get(producer.sequence)
        if earlier is not None:
            return earlier
        if producer.sequence == entry.last + 1 or producer.sequence > max(entry.last, SPARSE - 1):
            return None
        if SPARSE <= producer.sequence <= entry.last:
            return min(first for first, _ in entry.batches.values()), 0
        if producer.sequence <= entry.last:
            raise Conflict(
                f"batch {producer.sequence} of this producer is too old to be recognised; "
                f"the last one was {entry.last}"
            )
        raise Conflict(
            f"batch {producer.sequence} of this producer comes too early; "
            f"{entry.last + 1} is expected"
        )

    def add(self, producer: Producer, first: int, count: int, time: int) -> None:
        entry = self.entries.get(producer.id)
        if entry is None:
            entry = self.entries[producer.id] = ProducerEntry(time)
        entry.time = time
        entry.last = producer.sequence
        entry.batches[producer.sequence] = (first, count)
        if len(entry.batches) > BATCHES_REMEMBERED:
            del entry.batches[next(iter(entry.batches))]

    def expect(self, producer: Producer, time: int) -> None:
        """A failed first batch: its successors must not be taken for the first one. Those from
        `SPARSE` on need not follow one another."""
        if producer.id not in self.entries and producer.sequence < SPARSE:
            self.entries[producer.id] = ProducerEntry(time, last=producer.sequence - 1)

    def replay(self, rows: np.ndarray) -> None:
        """Add the batches of sidecar rows, in order."""
        for row in rows[(rows["flags"] & HAS_PRODUCER) != 0]:
            producer = Producer(bytes(row["producer"]), int(row["sequence"]))
            self.add(producer, int(row["first"]), int(row["count"]), int(row["time"]))

    def forget_before(self, now: int) -> None:
        cut = now - self._expiry
        for key in [key for key, entry in self.entries.items() if entry.time < cut]:
            del self.entries[key]
