"""The buffer's metrics, and its status for the API."""

import os
import time
from pathlib import Path

from penstock.buffer.backlog import BufferBacklog, BufferFile
from penstock.buffer.failed import FailedEvents
from penstock.buffer.files import KINDS, Kind
from penstock.buffer.journal import FailoverJournal
from penstock.buffer.maintenance import Maintenance
from penstock.buffer.qos0 import Qos0
from penstock.buffer.replay import BufferReplay, Progress
from penstock.contract.buffers import BufferStatus, FileStatus, KindStatus, Recovery
from penstock.metrics import Merge, Metrics

MAX_FILES = 200  # listed in a status


class BufferFigures:
    """The figures of the buffer's parts."""

    def __init__(
        self,
        journal: FailoverJournal,
        qos0: Qos0,
        backlog: BufferBacklog,
        failed: FailedEvents,
        replay: BufferReplay,
        maintenance: Maintenance,
        metrics: Metrics,
    ) -> None:
        self._journal = journal
        self._qos0 = qos0
        self._backlog = backlog
        self._failed = failed
        self._replay = replay
        self._maintenance = maintenance

        def by_kind(name: str, meaning: str, field: str, merge: Merge = "sum") -> None:
            def read() -> dict[tuple[str, ...], float]:
                return {(kind,): getattr(self.kind(kind), field) for kind in KINDS}

            metrics.gauge(name, meaning, "kind", read=read, merge=merge)

        waiting = "Buffered events that are not in the database yet"
        by_kind("penstock_buffer_pending", waiting, "pending")
        by_kind("penstock_buffer_files", "Buffer files", "files")
        by_kind("penstock_buffer_bytes", "Bytes in buffer files", "bytes")
        oldest = "Age of the oldest buffer file"
        by_kind("penstock_buffer_oldest_age_seconds", oldest, "oldest_age", "max")
        metrics.gauge(
            "penstock_buffer_failed",
            "Events in failed/ now, rejected by the database",
            read=lambda: failed.events,
        )
        metrics.gauge(
            "penstock_buffer_held_partitions",
            "Partitions with buffered events; new pushes to them are buffered too",
            read=lambda: backlog.held_partitions,
        )
        metrics.gauge(
            "penstock_buffer_replay_rate",
            "Events replayed per second",
            read=lambda: replay.rate,
        )
        metrics.gauge(
            "penstock_buffer_maintenance",
            "1 while maintenance mode is on, for pushes or pops",
            "mode",
            read=self._modes,
            merge="max",
        )

    def _modes(self) -> dict[tuple[str, ...], float]:
        modes = self._maintenance.modes
        return {("push",): int(modes.push), ("pop",): int(modes.pop)}

    @property
    def pending(self) -> int:
        return sum(self.kind(kind).pending for kind in KINDS)

    @property
    def bytes(self) -> int:
        """Return the bytes in files of this process."""
        files = [*self._journal.files, *self._qos0.files, *self._backlog.files]
        return sum(file.size for file in files) + self._failed.size

    def kind(self, kind: Kind) -> KindStatus:
        growing = self._journal if kind == "failover" else self._qos0
        files = self._backlog.files_of(kind) + growing.files
        unwritten = self._journal.unwritten if kind == "failover" else 0
        oldest = min((file.name.created_at for file in files if file.name.created_at), default=None)
        return KindStatus(
            pending=unwritten + sum(file.events - file.done for file in files),
            files=len(files),
            bytes=sum(file.size for file in files),
            oldest_age=0.0 if oldest is None else round(max(0.0, time.time() - oldest), 3),
            flushed=int(self._replay.flushed.value(kind)),
        )

    def files(self) -> list[FileStatus]:
        files = [_file(file, "failed", file.reason) for file in self._failed.files.values()]
        files += [_file(file, "waiting") for file in self._backlog.files[:MAX_FILES]]
        files += [_file(file, "growing") for file in self._qos0.files + self._journal.files]
        return sorted(files, key=lambda file: -(file.age or 0.0))[:MAX_FILES]

    def _drain_seconds(self) -> float | None:
        if not self.pending:
            return 0.0
        rate = self._replay.rate
        return round(self.pending / rate, 1) if rate > 0 else None

    def report(self, directory: Path, healthy: bool, progress: Progress | None) -> BufferStatus:
        return BufferStatus(
            pending=self.pending,
            failed=self._failed.events,
            db_healthy=healthy,
            worker=os.getpid(),
            maintenance_mode=self._maintenance.modes.push,
            pop_maintenance_mode=self._maintenance.modes.pop,
            held_partitions=self._backlog.held_partitions,
            replay_rate=round(self._replay.rate, 1),
            quarantined=int(self._replay.quarantined.value()),
            failed_files=sorted(self._failed.files),
            directory=str(directory),
            files=self.files(),
            drain_seconds=self._drain_seconds(),
            recovery=Recovery(progress.what, progress.done, progress.total) if progress else None,
            failover=self.kind("failover"),
            qos0=self.kind("qos0"),
        )


def _file(file: BufferFile, state: str, reason: str | None = None) -> FileStatus:
    begun = file.name.created_at
    return FileStatus(
        name=str(file.name),
        kind=file.name.kind,
        events=file.events,
        bytes=file.size,
        age=round(max(0.0, time.time() - begun), 3) if begun else None,
        state=state,
        reason=reason,
    )
