"""Opening a sealed segment: two rows of its index are looked at, and it is scanned only when these
are wrong.
"""

import numpy as np

from penstock.log.fs import File
from penstock.log.layout import (
    BATCH_SIZE,
    BATCHES,
    COMPACTED,
    DATA,
    HEADER_SIZE,
    INDEX,
    INDEX_SIZE,
    INDEX_TYPE,
    RECORD_HEADER,
    parse_batches,
    sealed_name,
)
from penstock.log.recovery.directory import Place, anchors_of
from penstock.log.scan import drop_untiled, scan
from penstock.log.segment import Segment


class SealedSegments:
    def __init__(self, place: Place) -> None:
        self.place = place

    def open(self, base: int, following: int | None) -> Segment:
        segment = Segment(self.place.fs, self.place.directory, base, sealed=True)
        for kind in (INDEX, BATCHES):
            if sealed_name(kind, base) not in self.place.names:
                self.place.report(
                    "repaired" if kind == INDEX else "lost", f"{sealed_name(kind, base)} is missing"
                )
                self.place.fs.open(segment.path(kind), create=True).close()
        data = segment.file(DATA)
        segment.data_size = data.size
        segment.holes = self.place.damage.holes_of(base)
        rows = segment.file(INDEX).size // INDEX_SIZE
        segment.rows = rows
        if segment.file(INDEX).size % INDEX_SIZE or not self._ends_well(segment, data, following):
            self._rebuild(segment, data, following)
        elif rows:
            segment.end = int(segment.index_rows(rows - 1, rows)["offset"][0]) + 1
        self._trust_batches(segment)
        return segment

    def _ends_well(self, segment: Segment, data: File, following: int | None) -> bool:
        if not segment.rows:
            return data.size == 0
        for row in (0, segment.rows - 1):
            offset, position = (int(value) for value in segment.index_rows(row, row + 1)[0])
            header = data.read_at(position, HEADER_SIZE)
            if len(header) < HEADER_SIZE or ((row == 0) != (position == 0) and segment.rows > 1):
                return False
            found, length = RECORD_HEADER.unpack(header)
            if (
                found != offset
                or offset < segment.base
                or (following is not None and offset >= following)
            ):
                return False
        return bool(position + HEADER_SIZE + length == data.size)

    def _rebuild(self, segment: Segment, data: File, following: int | None) -> None:
        limit = following if following is not None else 1 << 63
        index = self._all_index_rows(segment)
        batches = self.place.intact_batches(segment)
        found = scan(
            data, data.size, 0, segment.base, index=index, anchors=anchors_of(batches), limit=limit
        )
        found = drop_untiled(found, batches)
        self.place.damage.note_holes(segment, found.holes)
        if found.end < data.size:
            lost = data.size - found.end
            self.place.report(
                "lost" if following is None or found.next_offset < following else "quarantined",
                f"{segment.path(DATA).name}: {lost} bytes from {found.end} on are no records of this segment",
            )
            self.place.quarantine(segment, found.end, data.size)
            writable = self.place.fs.open(segment.path(DATA))
            writable.truncate(found.end)
            writable.close()
        segment.data_size, segment.rows = found.end, len(found.rows)
        segment.end = int(found.rows["offset"][-1]) + 1 if len(found.rows) else segment.base
        if not np.array_equal(found.rows, index):
            self.place.fs.replace(segment.path(INDEX), found.rows.tobytes())
            self.place.report(
                "repaired", f"{segment.path(INDEX).name} was built anew, {segment.rows} records"
            )
        segment.forget_files()

    def _all_index_rows(self, segment: Segment) -> np.ndarray:
        file = segment.file(INDEX)
        return np.frombuffer(file.read_at(0, file.size // INDEX_SIZE * INDEX_SIZE), INDEX_TYPE)

    def _trust_batches(self, segment: Segment) -> None:
        """Sealed sidecars are believed as they are: `verify` reads them whole, lookups only what
        they need.
        """
        file = segment.file(BATCHES)
        whole = file.size // BATCH_SIZE * BATCH_SIZE
        if whole != file.size:
            self.place.report("lost", f"{segment.path(BATCHES).name} ends in the middle of a row")
        segment.batches_size = whole
        segment.newest = self.place.modified(segment)
        if whole:
            segment.compacted = bool(int(segment.batch_rows(0, 1)["flags"][0]) & COMPACTED)
            rows, good = parse_batches(file.read_at(whole - BATCH_SIZE, BATCH_SIZE))
            if bool(good[0]) and int(rows["end"][0]) == segment.data_size:
                segment.newest = int(rows["time"][0])
            else:
                self.place.report(
                    "lost", f"{segment.path(BATCHES).name}: its last row does not match the segment"
                )
