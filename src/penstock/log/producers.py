"""Detect batches that idempotent producers have appended already.

A producer numbers its batches 0, 1, 2, ... The offsets of the last `BATCHES_REMEMBERED` batches of
each producer are kept. A batch that is sent again gets its first answer, and a batch that leaves a
gap is refused, so records are stored once and in order. An unknown producer may start anywhere: its
history may have expired.

Sequences from `SPARSE` on may leave gaps but must grow. They number something larger than a batch,
such as the epochs of a Spark query. A sequence below the last one that is not remembered counts as
stored. Its offsets are unknown, so the answer has 0 records.

Kafka's idempotent producers share the table. They number records modulo 2^31, and a batch has the
number of its first record. A repeated batch has the same number and the same count. A new epoch of
a producer begins at 0, and an old epoch is refused.

The table is derived from the commits. The checkpoint has a copy, so that a restart reads only later
rows. It is read when a commit is built; no other commit of the topic is in flight then.
"""

from struct import Struct
from typing import NamedTuple

from penstock.errors import Conflict
from penstock.log.layout import ProducerEntry
from penstock.protocol.frames import SPARSE

BATCHES_REMEMBERED = 128


_KAFKA_ID = Struct(">6sqh")
_KAFKA = b"kafka\0"  # prefix of the 16 bytes of a Kafka producer's id
_SEQUENCES = 1 << 31  # after this many, Kafka's sequences start over


class OutOfOrder(Conflict):
    """A batch is neither the next one of its producer nor a remembered one."""


class ProducerFenced(Conflict):
    """A newer epoch of this producer has appended."""


class Producer(NamedTuple):
    """A producer and its batch: `id` has 16 bytes, `sequence` counts batches."""

    id: bytes
    sequence: int

    @property
    def key(self) -> bytes:
        return self.id

    def follows(self, before: "AnyProducer") -> bool:
        return self.sequence == before.sequence + 1


class KafkaProducer(NamedTuple):
    """A Kafka producer and its batch; `sequence` is the number of the first record."""

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
        # All epochs of a Kafka producer share one key.
        self.entries = {parse_producer(one, 0, 0).key: entry for one, entry in entries.items()}
        self._expiry = int(expiry * 1e6)

    def earlier(self, producer: AnyProducer) -> tuple[int, int] | None:
        """Return offset and count of a repeated batch, None for the next one, or raise Conflict."""
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
        entry.batches.pop(producer.sequence, None)  # Kafka's numbers start over
        entry.batches[producer.sequence] = (first, count)
        if len(entry.batches) > BATCHES_REMEMBERED:
            del entry.batches[next(iter(entry.batches))]

    def expect(self, producer: AnyProducer, time: int) -> None:
        """Record that the producer's first batch failed, so that no later one takes its place."""
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
