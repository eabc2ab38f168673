"""Which sequence numbers are settled (delivered, dropped or dead-lettered): a set of ranges that
knows its records.

Workers settle blocks out of order, and newest-first draining settles the far end first, so a single
"acknowledged up to" is not enough. Each range keeps, beside its first and last sequence number, how
many records had been accepted before its first and through its last block; ranges that touch are
merged. From two neighbours one can tell how many records lie between them, even when the blocks
themselves are gone.
"""

from bisect import bisect_right
from collections.abc import Iterator


class Settled:
    """Disjoint ranges [start, end) of sequence numbers, in order; neighbours that touch are one
    range.
    """

    __slots__ = ("_before", "_ends", "_starts", "_through")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._before: list[int] = []  # records accepted before the range's first block
        self._through: list[int] = []  # records accepted through its last block

    def add(self, start: int, end: int, before: int, through: int) -> bool:
        """Put [start, end) in; False if it was there already. Ranges never overlap in part."""
        starts, ends = self._starts, self._ends
        at = bisect_right(starts, start) - 1
        if at >= 0 and ends[at] >= end:
            return False
        joins_left = at >= 0 and ends[at] == start
        joins_right = at + 1 < len(starts) and starts[at + 1] == end
        if joins_left and joins_right:
            ends[at] = ends.pop(at + 1)
            self._through[at] = self._through.pop(at + 1)
            del starts[at + 1], self._before[at + 1]
        elif joins_left:
            ends[at], self._through[at] = end, through
        elif joins_right:
            starts[at + 1], self._before[at + 1] = start, before
        else:
            starts.insert(at + 1, start)
            ends.insert(at + 1, end)
            self._before.insert(at + 1, before)
            self._through.insert(at + 1, through)
        return True

    def __contains__(self, sequence: int) -> bool:
        at = bisect_right(self._starts, sequence) - 1
        return at >= 0 and sequence < self._ends[at]

    def __len__(self) -> int:
        """The number of ranges."""
        return len(self._starts)

    def covers(self, start: int, end: int) -> bool:
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and end <= self._ends[at]

    def spans(self) -> Iterator[tuple[int, int, int, int]]:
        return zip(self._starts, self._ends, self._before, self._through, strict=True)

    def gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        """What of [start, end) is not settled."""
        found = []
        at = max(0, bisect_right(self._starts, start) - 1)
        while start < end and at < len(self._starts):
            if self._starts[at] >= end:
                break
            if self._starts[at] > start:
                found.append((start, self._starts[at]))
            start = max(start, self._ends[at])
            at += 1
        if start < end:
            found.append((start, end))
        return found

    def edge_before(self, sequence: int) -> int | None:
        """Records accepted through the block just in front of `sequence`, if a range ends there."""
        at = bisect_right(self._starts, sequence - 1) - 1
        return self._through[at] if at >= 0 and self._ends[at] == sequence else None

    def edge_after(self, sequence: int) -> int | None:
        """Records accepted before the block `sequence`, if a range begins there."""
        at = bisect_right(self._starts, sequence) - 1
        return self._before[at] if at >= 0 and self._starts[at] == sequence else None
