"""The segment format with Kafka's record batches: one file and one fsync per commit.

data.log            the active segment: record batches (`penstock.protocol.kafka_batch`)
index.idx           its sparse index (`penstock.log.batches.index`), a hint
data-<base>.log, index-<base>.idx
                    a sealed segment
checkpoint, incarnation, archived, policy, tier.json, damage.json, quarantine-...
                    as in aiq's layout (`penstock.log.layout`)
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from penstock.io.fs import Bytes, File, Fs
from penstock.log.batches.check import BatchCheck
from penstock.log.batches.encode import encode_arrays, encode_table, encode_values
from penstock.log.batches.index import SparseIndex
from penstock.log.batches.recovery import (
    ActiveBatchSegment,
    open_sealed_batches,
    proven_batch_base,
)
from penstock.log.batches.segment import KINDS, BatchSegment
from penstock.log.batches.walk import shape_at, whole_batches
from penstock.log.format import Arrays, Content, ReadyBatch, Records, SegmentFormat
from penstock.log.layout import DATA, INDEX, Checkpoint
from penstock.log.producers import AnyProducer, KafkaProducer, Producer, Producers
from penstock.log.segment import Mark, Segment, StoredBatch, Write
from penstock.log.topic_directory import MAX_OFFSET, TopicDirectory
from penstock.protocol.kafka_batch import (
    ASSIGNED,
    HEAD_SIZE,
    MAGIC_AT,
    NewRecord,
    encode_head,
    encode_record,
    encode_records,
    our_producer,
    plain_prefix,
    producer_header,
)


class BatchFormat(SegmentFormat):
    name = "kafka"
    kinds = KINDS
    written = (DATA,)
    synced_before = ()
    keyed = True

    # Writing

    def new_segment(self, fs: Fs, directory: Path, base: int, *, sealed: bool) -> BatchSegment:
        return BatchSegment(fs, directory, base, sealed=sealed)

    def add(self, write: Write, content: Content, producer: AnyProducer | None) -> None:
        first, epoch = write.first + write.count, int(write.count > 0)
        chunks: list[Bytes]
        if isinstance(content, ReadyBatch):
            head = content.head
            count, newest = head.records, head.max_timestamp
            chunks = [ASSIGNED.pack(first, head.length, epoch), content.data[MAGIC_AT:]]
        else:
            oldest = newest = write.time // 1000
            header = None
            if isinstance(producer, Producer):
                header = producer_header(producer.id, producer.sequence)
            if isinstance(content, Records):
                records = content.records
                times = [newest if one.timestamp is None else one.timestamp for one in records]
                if header is not None:
                    first_record = records[0]._replace(headers=[*records[0].headers, header])
                    records = [first_record, *records[1:]]
                chunks, count = [encode_records(records, times)], len(times)
                oldest, newest = times[0], max(times)
            else:
                chunks, count = _encode_payloads(content, header)
            fixed = encode_head(
                chunks,
                count,
                base_offset=first,
                timestamps=(oldest, newest),
                leader_epoch=epoch,
            )
            chunks = [fixed, *chunks]
        size = sum(map(len, chunks))
        time = newest * 1000 if newest > 0 else 0
        write.batches.append(StoredBatch(first, first + count, count, size, time))
        write.add({DATA: chunks}, count, size)

    def rebase(self, writes: Sequence[Write]) -> Mapping[str, Sequence[Bytes]]:
        if not writes:
            return {}
        index = SparseIndex(writes[0].first)
        for write in writes:
            for batch in write.batches:
                index.add(batch)
        chunks = [chunk for write in writes for chunk in write.parts[DATA]]
        return {INDEX: [index.pack()], DATA: chunks}

    def companions(self, segment: Segment, mark: Mark) -> dict[str, bytes]:
        assert isinstance(segment, BatchSegment)
        return {INDEX: segment.index.until(mark).pack()}

    def seals(self, segment: Segment, mark: Mark) -> dict[str, bytes]:
        return self.companions(segment, mark)

    # Opening

    def first_offset(self, data: File) -> int:
        shape = shape_at(data.read_at(0, min(data.size, HEAD_SIZE)), 0)
        return shape[0] if shape is not None else -1

    def described_size(self, kind: str, content: bytes) -> int:
        index = SparseIndex.parse(content) if kind == INDEX else None
        return index.size if index is not None else 0

    def described_end(self, kind: str, content: bytes) -> int:
        index = SparseIndex.parse(content) if kind == INDEX else None
        return index.end if index is not None and index.end < MAX_OFFSET else 0

    def proven_base(
        self, directory: TopicDirectory, sealed: list[int], checkpoint: Checkpoint | None
    ) -> int | None:
        return proven_batch_base(directory, sealed, checkpoint)

    def open_sealed(
        self, directory: TopicDirectory, base: int, following: int | None
    ) -> BatchSegment:
        return open_sealed_batches(directory, base, following)

    def open_active(
        self,
        directory: TopicDirectory,
        sealed: list[Segment],
        checkpoint: Checkpoint | None,
        proven: int | None,
    ) -> ActiveBatchSegment:
        return ActiveBatchSegment(self, directory, sealed, checkpoint, proven)

    def replay(self, producers: Producers, segment: Segment, start: Checkpoint | None) -> None:
        """Add the producers of a segment. Timestamps of records are arbitrary, so a producer counts
        as active until the file was last modified.
        """
        assert isinstance(segment, BatchSegment)
        at = min(start.data_size, segment.data_size) if start is not None else 0
        offset = start.next_offset if start is not None and at else segment.base
        data, written = segment.file(DATA), segment.modified()
        for begin, end in _between_holes(segment, at):
            for batch in whole_batches(data, begin, end, offset, limit=MAX_OFFSET):
                head, offset = batch.head, batch.head.next_offset
                producer: AnyProducer | None = None
                if head.producer_id >= 0:
                    producer = KafkaProducer(
                        head.producer_id, head.producer_epoch, head.base_sequence, head.records
                    )
                elif (ours := our_producer(batch.data, head)) is not None:
                    producer = Producer(*ours)
                if producer is not None:
                    time = max(head.max_timestamp * 1000, written)
                    producers.add(producer, head.base_offset, head.records, time)

    # Checking

    def check(self, segment: Segment) -> BatchCheck:
        assert isinstance(segment, BatchSegment)
        return BatchCheck(segment)


BATCHES = BatchFormat()


def _between_holes(segment: Segment, start: int) -> list[tuple[int, int]]:
    """Return the parts of the data from `start` on that are batches."""
    edges = [start]
    for begin, stop in segment.holes:
        if stop > start:
            edges += (max(begin, start), stop)
    edges.append(segment.data_size)
    return list(zip(edges[0::2], edges[1::2], strict=True))


def _encode_payloads(
    content: list[Bytes] | Arrays | np.ndarray, header: tuple[str, bytes] | None
) -> tuple[list[Bytes], int]:
    """Return the encoded records of a batch with these payloads, in parts, and their number."""
    if isinstance(content, list):
        count, first, records = len(content), content[0], encode_values(content)
    elif isinstance(content, Arrays):
        lengths, payloads = content
        count, first = len(lengths), payloads[: int(lengths[0])]
        records = encode_arrays(lengths, payloads)
    else:
        count, first = len(content), content[:1].tobytes()
        records = encode_table(content)
    if header is None:
        return [records], count
    size = len(plain_prefix(0, len(first))) + len(first) + 1
    named = encode_record(0, NewRecord(first, headers=[header]), 0)
    return [named, memoryview(records)[size:]], count
