"""Report damage of a topic: log it once, count it, and record losses in `damage.json`.

Recovery writes the file when a topic is opened, and the scrub while it runs. The admin API and
`verify` show it. Each place in it has an `outcome`, a description `what`, and the `file`; for lost
records also `lost_from` and `lost_to`. With `base`, `start` and `end`, it is a hole in the data of
that segment.
"""

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from penstock.io.fs import Fs
from penstock.log.layout import DAMAGE, DATA, label_of
from penstock.log.segment import Segment
from penstock.metrics import Counter

log = logging.getLogger("penstock.topics")


class Hole(NamedTuple):
    """Bytes of a data file that are damaged."""

    start: int
    end: int
    lost_from: int  # offsets that should have been there
    lost_to: int


class DamageReport:
    def __init__(self, fs: Fs, directory: Path, counter: Counter) -> None:
        self._fs = fs
        self._directory = directory
        self.places: list[dict[str, Any]] = []  # the contents of damage.json
        self._counter = counter
        self._changed = False  # whether damage.json must be written

    def read(self) -> None:
        try:
            self.places = read_places(self._fs.read(self._directory / DAMAGE))
        except ValueError:
            self.report("repaired", f"{DAMAGE} could not be read and is recreated")
            self._changed = True

    def write(self) -> None:
        """Write `damage.json` if it has changed."""
        if self._changed:
            self._fs.replace(
                self._directory / DAMAGE, json.dumps(self.places, indent=1).encode() + b"\n"
            )
            self._changed = False

    def report(self, outcome: str, text: str, **lost: Any) -> None:
        """Log and count damage. With `lost`, add it to `damage.json`."""
        log.warning("topic %s: %s: %s", label_of(self._directory), outcome, text)
        self._counter.add(1, outcome)
        if lost:
            self.places.append({"outcome": outcome, "what": text, **lost})
            self._changed = True

    def report_lost(self, text: str, file: str, lost_from: int, lost_to: int, **more: Any) -> None:
        """Report that records of these offsets are lost, unless that was reported before."""
        if not any(
            (place.get("lost_from"), place.get("lost_to")) == (lost_from, lost_to)
            for place in self.places
        ):
            self.report("lost", text, file=file, lost_from=lost_from, lost_to=lost_to, **more)

    @property
    def end(self) -> int:
        """Return the offset below which none may be assigned to another record."""
        ends = (place.get("lost_to", 0) for place in self.places)
        return max((end for end in ends if end < 1 << 62), default=0)

    def holes_of(self, base: int) -> tuple[tuple[int, int], ...]:
        return holes_of(self.places, base)

    def note_holes(self, segment: Segment, holes: list[Hole]) -> None:
        name = segment.path(DATA).name
        noted = set(self.holes_of(segment.base))
        for hole in holes:
            if (hole.start, hole.end) in noted:
                continue
            self.report(
                "lost",
                f"{name}: offsets {hole.lost_from} to {hole.lost_to - 1}, "
                f"bytes {hole.start} to {hole.end} are damaged",
                file=name,
                base=segment.base,
                **hole._asdict(),
            )
        segment.holes = self.holes_of(segment.base)

    def note_gaps(self, segments: list[Segment]) -> None:
        for one, other in pairwise(segments):
            if one.end < other.base and not one.compacted:
                name = one.path(DATA).name
                text = f"{name} ends at offset {one.end}, the next segment begins at {other.base}"
                self.report_lost(text, name, one.end, other.base)


def holes_of(places: list[dict[str, Any]], base: int) -> tuple[tuple[int, int], ...]:
    """Return the holes of the segment with this base, from and up to, in order."""
    holes = (
        (int(place["start"]), int(place["end"]))
        for place in places
        if place.get("base") == base and "start" in place and "end" in place
    )
    return tuple(sorted(holes))


def read_places(data: bytes) -> list[dict[str, Any]]:
    """Return the contents of a `damage.json`. Raises ValueError if it is not valid."""
    places = json.loads(data)
    if not isinstance(places, list):
        raise ValueError(f"{DAMAGE} does not contain a list")
    return [place for place in places if isinstance(place, dict) and _is_sane(place)]


def _is_sane(place: dict[str, Any]) -> bool:
    numbers = ("lost_from", "lost_to", "base", "start", "end")
    return all(type(place.get(key, 0)) is int for key in numbers) and ("lost_from" in place) == (
        "lost_to" in place
    )
