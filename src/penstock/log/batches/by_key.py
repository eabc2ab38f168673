"""Compact record batches by key: keep the latest record of each key.

Records keep their offsets, times and order, so offsets get gaps. Records without a key are kept. A
tombstone is kept for `TOMBSTONE_SECONDS` after its time, so that readers see it.
"""

from hashlib import blake2b

from penstock.errors import Damaged
from penstock.io.fs import Bytes
from penstock.log.batches.decode import Decoder, records_of
from penstock.protocol.kafka_batch import (
    CODEC_MASK,
    BatchHead,
    KafkaRecord,
    NewRecord,
    encode_head,
    encode_record,
)

TOMBSTONE_SECONDS = 86_400.0
MAX_KEYS = 2_000_000  # about 200 bytes each; records of further keys are left for another pass


class LatestOffsets:
    """The last offset of each key, by digest of the key."""

    def __init__(self, now: float) -> None:
        self._offsets: dict[bytes, int] = {}
        self._expired = int((now - TOMBSTONE_SECONDS) * 1000)  # older tombstones are removed

    def add(self, head: BatchHead, data: Bytes) -> None:
        """Record the keys of a batch. Batches are added in the order of the log."""
        for record in _records(head, data):
            if record.key is not None:
                digest = _digest(record.key)
                if len(self._offsets) < MAX_KEYS or digest in self._offsets:
                    self._offsets[digest] = record.offset

    def compact(self, head: BatchHead, data: Bytes, last: int) -> tuple[Bytes, int]:
        """Return the batch without replaced records, and the number of its records. The record at
        `last` is kept, so that there is no gap before the next segment.
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
        if latest is None:  # keep a tombstone as long as the records that it deletes
            return True
        if record.offset < latest:
            return False
        return record.value is not None or record.timestamp >= self._expired


def _digest(key: bytes) -> bytes:
    return blake2b(key, digest_size=16).digest()


def _records(head: BatchHead, data: Bytes) -> list[KafkaRecord]:
    """Return the records of an intact batch; none if they cannot be decoded."""
    decoder = Decoder()
    try:
        decoder.add(data, head)
    except Damaged:
        return []
    return records_of(decoder.columns(), slice(None), whole=True)
