"""What is known to be damaged in a topic: told once, counted, and kept in `damage.json` when something was lost.

Recovery writes it when a topic is opened, the scrub while it runs; the admin API and `verify` show it. A place in
`damage.json` has an `outcome`, `what` in words, and where: `file`, and for lost records `lost_from` and `lost_to`;
with `base`, `start` and `end` it is a hole in the data of that segment.
"""

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.metrics import Counter
from penstock.storage.fs import Fs
from penstock.topics.layout import DAMAGE, DATA
from penstock.topics.scan import Hole
from penstock.topics.segment import Segment

log = logging.getLogger("penstock.topics")


class Damage:
    def __init__(self, fs: Fs, directory: Path, counter: Counter) -> None:
        self.fs, self.directory = fs, directory
        self.places: list[dict[str, Any]] = []
        self._counter = counter
        self._changed = False  # whether damage.json must be written

    def read(self) -> None:
        try:
            found = json.loads(self.fs.read(self.directory / DAMAGE))
            self.places = [place for place in found if isinstance(place, dict)]
        except (ValueError, TypeError):
            self.report("repaired", f"{DAMAGE} could not be read and is started anew")
            self._changed = True

    def write(self) -> None:
        """Unless the file says it already."""
        if self._changed:
            self.fs.replace(self.directory / DAMAGE, json.dumps(self.places, indent=1).encode() + b"\n")
            self._changed = False

    def report(self, outcome: str, text: str, **lost: Any) -> None:
        """Log and count it; with `lost`, note it too."""
        log.warning("topic %s: %s: %s", self.directory.name, outcome, text)
        self._counter.add(1, outcome)
        if lost:
            self.places.append({"outcome": outcome, "what": text, **lost})
            self._changed = True

    def holes_of(self, base: int) -> tuple[tuple[int, int], ...]:
        found = (
            (int(place["start"]), int(place["end"]))
            for place in self.places
            if place.get("base") == base and "start" in place and "end" in place
        )
        return tuple(sorted(found))

    def note_holes(self, segment: Segment, holes: list[Hole]) -> None:
        name = segment.path(DATA).name
        known = set(self.holes_of(segment.base))
        for hole in holes:
            if (hole.start, hole.end) in known:
                continue
            self.report(
                "lost",
                f"{name}: offsets {hole.lost_from} to {hole.lost_to - 1}, bytes {hole.start} to {hole.end} are damaged",
                file=name,
                base=segment.base,
                start=hole.start,
                end=hole.end,
                lost_from=hole.lost_from,
                lost_to=hole.lost_to,
            )
        segment.holes = self.holes_of(segment.base)

    def note_gaps(self, segments: list[Segment]) -> None:
        known = {(place.get("lost_from"), place.get("lost_to")) for place in self.places}
        for one, other in pairwise(segments):
            if one.end < other.base and (one.end, other.base) not in known and not one.compacted:
                name = one.path(DATA).name
                self.report(
                    "lost",
                    f"{name} ends at offset {one.end}, the next segment begins at {other.base}",
                    file=name,
                    lost_from=one.end,
                    lost_to=other.base,
                )
