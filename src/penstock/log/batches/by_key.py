"""Compaction of record batches by key: the latest record of each key stays.

Offsets, times and order stay; offsets get gaps. Records without a key stay. A tombstone stays for
`TOMBSTONE_SECONDS` after its time, so that readers can see it, and then goes too.
"""

from hashlib import blake2b

from penstock.io.fs import Bytes
from penstock.log.batches.decode import Decoder, records_of
from penstock.protocol.kafka_batch import (
    CODEC_MASK,
    CONTROL,
    BatchHead,
    KafkaRecord,
    NewRecord,
    encode_head,
    encode_record,
)

TOMBSTONE_SECONDS = 86_400.0
MAX_KEYS = 2_000_000  # about 200 bytes each; records of further keys stay until another pass


class LatestOffsets:
    """The last offset of each key, by a digest."""

    def __init__(self, now: float) -> None:
        self._offsets: dict[bytes, int] = {}
        self._expired = int((now - TOMBSTONE_SECONDS) * 1000)  # tombstones from before may go

    def add(self, head: BatchHead, data: Bytes) -> None:
        """Note the keys of a batch, which comes after those noted before."""
        for record in _records(head, data):
            if record.key is not None:
                digest = _digest(record.key)
                if len(self._offsets) < MAX_KEYS or digest in self._offsets:
                    self._offsets[digest] = record.offset

    def compact(self, head: BatchHead, data: Bytes, last: int) -> tuple[Bytes, int]:
        """Return the batch without records that were replaced, and how many records it has. The
        record at `last` stays, so that the batches still meet what follows.
        """
        records = _records(head, data)
        kept = [one for one in records if one.offset == last or self._stays(one)]
        if len(kept) == len(records):
            return data, head.records
        if not kept:
            return b"", 0
        encoded = b"".join(
            encode_record(
                one.offset - head.base_offset,
                NewRecord(one.value, one.key, one.headers),
                one.timestamp - head.base_timestamp,
            )
            for one in kept
        )
        fixed = encode_head(
            [encoded],
            len(kept),
            base_offset=head.base_offset,
            timestamps=(head.base_timestamp, head.max_timestamp),
            last_offset_delta=head.last_offset_delta,
            attributes=head.attributes & ~CODEC_MASK,
            producer=(head.producer_id, head.producer_epoch, head.base_sequence),
        )
        return fixed + encoded, len(kept)

    def _stays(self, record: KafkaRecord) -> bool:
        if record.key is None:
            return True
        latest = self._offsets.get(_digest(record.key))
        if latest is None:  # a tombstone must not go before what it deletes
            return True
        if record.offset < latest:
            return False
        return record.value is not None or record.timestamp >= self._expired


def _digest(key: bytes) -> bytes:
    return blake2b(key, digest_size=16).digest()


def _records(head: BatchHead, data: Bytes) -> list[KafkaRecord]:
    if head.attributes & CONTROL:
        return []
    decoder = Decoder()
    decoder.add(data, head)
    return records_of(decoder.columns(), slice(None), whole=True)
