"""The segment format with aiq's layout. `penstock.log.layout` documents it byte by byte."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from crc32c import crc32c

from penstock.io.fs import Bytes, File, Fs
from penstock.log.aiq.active import ActiveAiqSegment, proven_base
from penstock.log.aiq.checksums import AiqCheck
from penstock.log.aiq.encode import frame_arrays, frame_payloads, frame_table
from penstock.log.aiq.scan import record_at
from penstock.log.aiq.sealed import open_sealed_aiq
from penstock.log.aiq.segment import AiqSegment
from penstock.log.format import Arrays, Content, SegmentFormat
from penstock.log.layout import (
    BATCH_SIZE,
    BATCH_TYPE,
    BATCHES,
    DATA,
    HAS_PRODUCER,
    INDEX,
    INDEX_SIZE,
    INDEX_TYPE,
    KINDS,
    METADATA,
    NO_PRODUCER,
    BatchRow,
    Checkpoint,
    pack_batch_row,
    pack_metadata,
    parse_batches,
)
from penstock.log.producers import AnyProducer, Producers, parse_producer
from penstock.log.segment import Mark, Segment, Write
from penstock.log.topic_directory import MAX_OFFSET, TopicDirectory


class AiqFormat(SegmentFormat):
    name = "aiq"
    kinds = KINDS
    written = (BATCHES, DATA, INDEX)
    synced_before = (BATCHES,)
    keyed = False

    # Writing

    def new_segment(self, fs: Fs, directory: Path, base: int, *, sealed: bool) -> AiqSegment:
        return AiqSegment(fs, directory, base, sealed=sealed)

    def add(self, write: Write, content: Content, producer: AnyProducer | None) -> None:
        first, position = write.first + write.count, write.position + write.size
        if isinstance(content, list):
            laid_out = frame_payloads(content, first, position)
        elif isinstance(content, Arrays):
            laid_out = frame_arrays(content.lengths, content.payloads, first, position)
        elif isinstance(content, np.ndarray):
            laid_out = frame_table(content, first, position)
        else:
            raise TypeError("aiq's layout has only payloads")
        data, index, count = laid_out
        size = len(data)
        flags, identity, sequence = 0, NO_PRODUCER, 0
        if producer is not None:
            flags, identity, sequence = HAS_PRODUCER, producer.id, producer.sequence
        end, time, crc = position + size, write.time, crc32c(data)
        row = pack_batch_row(first, count, flags, position, end, time, identity, sequence, crc)
        write.add({BATCHES: [row], DATA: [data], INDEX: [index]}, count, size)

    def rebase(self, writes: Sequence[Write]) -> Mapping[str, Sequence[Bytes]]:
        """Return the chunks of the writes, with positions relative to the first record."""
        if not writes:
            return {}
        index = np.frombuffer(_joined(writes, INDEX), INDEX_TYPE).copy()
        delta = int(index["position"][0])
        index["position"] -= np.uint64(delta)
        rows = np.frombuffer(_joined(writes, BATCHES), BATCH_TYPE)
        moved = [
            row._replace(start=row.start - delta, end=row.end - delta).pack()
            for row in (BatchRow(*fields[:-1]) for fields in rows.tolist())
        ]
        return {
            INDEX: [index.tobytes()],
            DATA: [chunk for write in writes for chunk in write.parts[DATA]],
            BATCHES: moved,
        }

    def companions(self, _: Segment, mark: Mark) -> dict[str, bytes]:
        return {METADATA: pack_metadata(mark.end)}

    def seals(self, _: Segment, __: Mark) -> dict[str, bytes]:
        return {}

    # Opening

    def first_offset(self, data: File) -> int:
        return record_at(data, 0, data.size)[0]

    def described_size(self, kind: str, content: bytes) -> int:
        rows, _ = parse_batches(content)
        return int(rows["end"][-1]) if kind == BATCHES and len(rows) else 0

    def described_end(self, kind: str, content: bytes) -> int:
        if kind == BATCHES:
            rows, good = parse_batches(content)
            ends = (rows["first"] + rows["count"])[good]
            return int(ends.max()) if len(ends) else 0
        offsets = np.frombuffer(content, INDEX_TYPE, len(content) // INDEX_SIZE)["offset"]
        if not len(offsets):
            return 0
        rising = int(np.argmin(np.append(offsets[1:] > offsets[:-1], False)))
        return int(offsets[rising]) + 1 if offsets[rising] < MAX_OFFSET else 0

    def proven_base(
        self, directory: TopicDirectory, sealed: list[int], checkpoint: Checkpoint | None
    ) -> int | None:
        return proven_base(directory, sealed, checkpoint)

    def open_sealed(
        self, directory: TopicDirectory, base: int, following: int | None
    ) -> AiqSegment:
        return open_sealed_aiq(directory, base, following)

    def open_active(
        self,
        directory: TopicDirectory,
        sealed: list[Segment],
        checkpoint: Checkpoint | None,
        proven: int | None,
    ) -> ActiveAiqSegment:
        return ActiveAiqSegment(self, directory, sealed, checkpoint, proven)

    def replay(self, producers: Producers, segment: Segment, start: Checkpoint | None) -> None:
        size = segment.sizes()[BATCHES] // BATCH_SIZE * BATCH_SIZE
        begin = min(start.batches_size, size) if start is not None else 0
        rows, good = parse_batches(segment.file(BATCHES).read_at(begin, size - begin))
        for row in rows[good & ((rows["flags"] & HAS_PRODUCER) != 0)]:
            count = int(row["count"])
            producer = parse_producer(bytes(row["producer"]), int(row["sequence"]), count)
            producers.add(producer, int(row["first"]), count, int(row["time"]))

    # Checking

    def check(self, segment: Segment) -> AiqCheck:
        assert isinstance(segment, AiqSegment)
        return AiqCheck(segment)


AIQ = AiqFormat()


def _joined(writes: Sequence[Write], kind: str) -> bytes:
    return b"".join(chunk for write in writes for chunk in write.parts[kind])
