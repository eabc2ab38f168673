"""A topic's directory while it is opened: the file operations that all parts of recovery share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.log.context import Context
from penstock.log.damage import DamageReport
from penstock.log.layout import (
    DATA,
    INCARNATION,
    METADATA,
    Checkpoint,
    parse_metadata,
    parse_sealed,
)
from penstock.log.segment import Segment

MAX_OFFSET = 1 << 62  # an offset from here on is garbage


@dataclass(slots=True)
class Orphan:
    """A sealed segment whose data file is missing."""

    end: int  # the offset after its last record, according to its other files
    names: list[str] = field(default_factory=list)  # those files


class TopicDirectory:
    def __init__(self, context: Context, path: Path) -> None:
        self.fs = context.fs
        self.context = context
        self.path = path
        self.names = set(self.fs.list_dir(path))
        self.orphans: dict[int, Orphan] = {}  # by base
        self.damage = DamageReport(self.fs, path, context.instruments.damage)
        self.report = self.damage.report

    def sealed_files(self) -> list[tuple[str, int]]:
        return [file for file in map(parse_sealed, sorted(self.names)) if file is not None]

    def read(self, name: str) -> bytes | None:
        """Return the contents of a small file; None if it is missing."""
        return self.fs.read(self.path / name) if name in self.names else None

    def read_metadata(self) -> int | None:
        return parse_metadata(self.read(METADATA) or b"")

    def create_missing(
        self, kinds: Iterable[str], checkpoint: Checkpoint | None, sealed: Sequence[Segment]
    ) -> None:
        """Create the missing files of the active segment. They are damage, unless the topic is new
        or the broker ended between sealing a segment and creating the next one.
        """
        ours = checkpoint is not None or INCARNATION in self.names
        rolled = checkpoint and sealed and sealed[-1].base == checkpoint.base
        for kind in kinds:
            if kind not in self.names:
                if ours and not rolled:
                    self.report("lost" if kind == DATA else "repaired", f"{kind} is missing")
                self.fs.open(self.path / kind, create=True).close()

    def cut_sealed(self, segment: Segment, size: int, *, lost: bool) -> None:
        """Cut a sealed segment's data to `size` bytes. `lost`: acknowledged records may be cut."""
        data = segment.file(DATA)
        if data.size <= size:
            return
        self.report(
            "lost" if lost else "quarantined",
            f"{segment.path(DATA).name}: {data.size - size} bytes from {size} on do not belong to "
            "this segment",
        )
        self.quarantine(segment, size, data.size)
        writable = self.fs.open(segment.path(DATA))
        writable.truncate(size)
        writable.close()
        segment.forget_files()

    def quarantine(self, segment: Segment, start: int, end: int) -> None:
        """Copy these bytes of the data to a new file."""
        data = segment.file(DATA).read_at(start, end - start)
        target = self.path / f"quarantine-{segment.base:020d}-{start}.bin"
        self.fs.replace(target, data)
        self.context.instruments.quarantined.add(len(data))
        self.report(
            "quarantined",
            f"{len(data)} bytes cut off {segment.path(DATA).name} at {start}, "
            f"kept in {target.name}",
        )
