"""Open a sealed segment: check two rows of its index, and scan it only if one is wrong."""

import numpy as np

from penstock.io.fs import File
from penstock.log.aiq.scan import anchors_of, drop_untiled, intact_batches, record_at, scan
from penstock.log.aiq.segment import AiqSegment
from penstock.log.layout import (
    BATCH_SIZE,
    BATCHES,
    COMPACTED,
    DATA,
    INDEX,
    INDEX_SIZE,
    INDEX_TYPE,
    parse_batches,
    sealed_name,
)
from penstock.log.topic_directory import TopicDirectory


def open_sealed_aiq(directory: TopicDirectory, base: int, following: int | None) -> AiqSegment:
    segment = AiqSegment(directory.fs, directory.path, base, sealed=True)
    for kind in (INDEX, BATCHES):
        if sealed_name(kind, base) not in directory.names:
            directory.report(
                "repaired" if kind == INDEX else "lost", f"{sealed_name(kind, base)} is missing"
            )
            directory.fs.open(segment.path(kind), create=True).close()
    data = segment.file(DATA)
    segment.data_size = data.size
    segment.holes = directory.damage.holes_of(base)
    rows = segment.file(INDEX).size // INDEX_SIZE
    segment.rows = rows
    if segment.file(INDEX).size % INDEX_SIZE or not _ends_well(segment, data, following):
        _rebuild(directory, segment, data, following)
    elif rows:
        segment.end = segment.offset_of(rows - 1) + 1
    _trust_batches(directory, segment)
    return segment


def _ends_well(segment: AiqSegment, data: File, following: int | None) -> bool:
    if not segment.rows:
        return data.size == 0
    for row in (0, segment.rows - 1):
        offset, position = segment.index_rows(row, row + 1)[0].item()
        stored, end = record_at(data, position, data.size)
        if (
            stored != offset
            or offset < segment.base
            or (following is not None and offset >= following)
            or ((row == 0) != (position == 0) and segment.rows > 1)
        ):
            return False
    return end == data.size


def _rebuild(
    directory: TopicDirectory, segment: AiqSegment, data: File, following: int | None
) -> None:
    limit = following if following is not None else 1 << 63
    file = segment.file(INDEX)
    index = np.frombuffer(file.read_at(0, file.size // INDEX_SIZE * INDEX_SIZE), INDEX_TYPE)
    batches = intact_batches(segment)
    scanned = scan(
        data, data.size, 0, segment.base, index=index, anchors=anchors_of(batches), limit=limit
    )
    scanned = drop_untiled(scanned, batches)
    directory.damage.note_holes(segment, scanned.holes)
    lost = following is None or scanned.next_offset < following
    directory.cut_sealed(segment, scanned.end, lost=lost)
    segment.data_size, segment.rows = scanned.end, len(scanned.rows)
    segment.end = int(scanned.rows["offset"][-1]) + 1 if len(scanned.rows) else segment.base
    if not np.array_equal(scanned.rows, index):
        directory.fs.replace(segment.path(INDEX), scanned.rows.tobytes())
        directory.report(
            "repaired", f"{segment.path(INDEX).name} was rebuilt, {segment.rows} records"
        )
    segment.forget_files()


def _trust_batches(directory: TopicDirectory, segment: AiqSegment) -> None:
    """Check only the last row of a sealed sidecar: `verify` and lookups check the rest."""
    file = segment.file(BATCHES)
    whole = file.size // BATCH_SIZE * BATCH_SIZE
    if whole != file.size:
        directory.report("lost", f"{segment.path(BATCHES).name} ends in the middle of a row")
    segment.batches_size = whole
    segment.newest = segment.modified() if segment.rows else 0
    if whole:
        segment.compacted = bool(int(segment.batch_rows(0, 1)["flags"][0]) & COMPACTED)
        rows, good = parse_batches(file.read_at(whole - BATCH_SIZE, BATCH_SIZE))
        if bool(good[0]) and int(rows["end"][0]) == segment.data_size:
            segment.newest = int(rows["time"][0])
        else:
            directory.report(
                "lost", f"{segment.path(BATCHES).name}: its last row does not match the segment"
            )
