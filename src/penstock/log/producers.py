"""Idempotence: which batches of which producers are in the log already.

A producer numbers its batches 0, 1, 2, ...; the last `BATCHES_REMEMBERED` of each are kept with
where they went. A batch sent again is answered with its first offsets, a batch that skips one is
refused, so a producer that pipelines and retries gets its records stored once and in order. An
unknown producer may start anywhere (its history may have expired). Sequences from `SPARSE` on may
leave gaps and only have to grow: they are for those who number something larger than a batch, as a
Spark query numbers its epochs. One that is behind the last and no longer remembered counts as
stored; where it went is then unknown, and its answer says 0 records.

Kafka's idempotent producers are in the same table. They number records, not batches, modulo 2^31:
the next batch begins with the number after the last record's. The same batch again has the same
number and as many records; a new epoch of a producer begins at 0, an old one is refused.

The table is derived from what commits
store; the checkpoint carries a copy so that a restart reads only
the rows after it. It is asked when a commit is put together, at which moment nothing of this topic
is in flight.
"""

from struct import Struct
from typing import NamedTuple

from penstock.errors import Conflict
from penstock.log.layout import ProducerEntry
from penstock.protocol.frames import SPARSE

BATCHES_REMEMBERED = 128


_KAFKA_ID = Struct(">6sqh")
_KAFKA = b"kafka\0"  # how the 16 bytes begin that stand for one of Kafka's producers
_SEQUENCES = 1 << 31  # Kafka's, after which they start over


class OutOfOrder(Conflict):
    """A batch of a producer is not the next one, and not one that is remembered."""


class ProducerFenced(Conflict):
    """A newer epoch of this producer has appended."""


class Producer(NamedTuple):
    """Who appends, and the number of this batch: `id` is 16 bytes and `sequence` counts batches."""

    id: bytes
    sequence: int

    @property
    def key(self) -> bytes:
        return self.id

    def follows(self, before: "AnyProducer") -> bool:
        return self.sequence == before.sequence + 1


class KafkaProducer(NamedTuple):
    """One of Kafka's, and its batch: the number of its first record, and how many it has."""

    producer_id: int
    epoch: int
    sequence: int
    records: int

    @property
    def id(self) -> bytes:
        """Return the id as the sidecar and the checkpoint store it."""
        return _KAFKA_ID.pack(_KAFKA, self.producer_id, self.epoch)

    @property
    def key(self) -> bytes:
        return _KAFKA_ID.pack(_KAFKA, self.producer_id, 0)

    def follows(self, before: "AnyProducer") -> bool:
        return (
            isinstance(before, KafkaProducer)
            and before.epoch == self.epoch
            and self.sequence == (before.sequence + before.records) % _SEQUENCES
        )


AnyProducer = Producer | KafkaProducer


def parse_producer(stored: bytes, sequence: int, records: int) -> AnyProducer:
    """Return the producer with this id on disk, and its batch."""
    if stored.startswith(_KAFKA):
        _, producer_id, epoch = _KAFKA_ID.unpack(stored)
        return KafkaProducer(producer_id, epoch, sequence, records)
    return Producer(stored, sequence)


class Producers:
    __slots__ = ("_expiry", "entries")

    def __init__(self, entries: dict[bytes, ProducerEntry], expiry: float) -> None:
        # By key, under which all epochs of one of Kafka's producers are one.
        self.entries = {parse_producer(one, 0, 0).key: entry for one, entry in entries.items()}
        self._expiry = int(expiry * 1e6)

    def earlier(self, producer: AnyProducer) -> tuple[int, int] | None:
        """Return where this batch was stored before; None if it is the next one; or Conflict."""
        entry = self.entries.get(producer.key)
        if entry is None:
            return None
        if isinstance(producer, KafkaProducer):
            return _earlier_of_kafka(producer, entry)
        earlier = entry.batches.get(producer.sequence)
        if earlier is not None:
            return earlier
        if producer.sequence == entry.last + 1 or producer.sequence > max(entry.last, SPARSE - 1):
            return None
        if SPARSE <= producer.sequence <= entry.last:
            return min(first for first, _ in entry.batches.values()), 0
        if producer.sequence <= entry.last:
            raise OutOfOrder(
                f"batch {producer.sequence} of this producer is too old to be recognised; "
                f"the last one was {entry.last}"
            )
        raise OutOfOrder(
            f"batch {producer.sequence} of this producer comes too early; "
            f"{entry.last + 1} is expected"
        )

    def add(self, producer: AnyProducer, first: int, count: int, time: int) -> None:
        entry = self.entries.get(producer.key)
        if entry is None or (isinstance(producer, KafkaProducer) and producer.id != entry.id):
            entry = self.entries[producer.key] = ProducerEntry(time, id=producer.id)
        entry.time = time
        entry.last = producer.sequence
        entry.batches.pop(producer.sequence, None)  # of Kafka's numbers, before they started over
        entry.batches[producer.sequence] = (first, count)
        if len(entry.batches) > BATCHES_REMEMBERED:
            del entry.batches[next(iter(entry.batches))]

    def expect(self, producer: AnyProducer, time: int) -> None:
        """A failed first batch: its successors must not be taken for the first one. Those from
        `SPARSE` on need not follow one another."""
        if producer.key not in self.entries and producer.sequence < SPARSE:
            self.entries[producer.key] = ProducerEntry(
                time, last=producer.sequence - 1, id=producer.id
            )

    def forget_before(self, now: int) -> None:
        cut = now - self._expiry
        for key in [key for key, entry in self.entries.items() if entry.time < cut]:
            del self.entries[key]


def _earlier_of_kafka(producer: KafkaProducer, entry: ProducerEntry) -> tuple[int, int] | None:
    _, _, epoch = _KAFKA_ID.unpack(entry.id)
    who = f"producer {producer.producer_id}"
    if producer.epoch < epoch:
        raise ProducerFenced(f"{who} has epoch {epoch}, this batch has {producer.epoch}")
    if producer.epoch > epoch:
        if producer.sequence:
            raise OutOfOrder(f"{who}: a new epoch begins with sequence 0, not {producer.sequence}")
        return None
    earlier = entry.batches.get(producer.sequence)
    if earlier is not None and earlier[1] == producer.records:
        return earlier
    _, records = entry.batches.get(entry.last, (0, 1))
    expected = (entry.last + records) % _SEQUENCES
    if producer.sequence != expected:
        raise OutOfOrder(f"{who}: sequence {producer.sequence}, {expected} is expected")
    return None
