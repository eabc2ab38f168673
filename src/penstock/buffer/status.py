"""The buffer's metrics, and its status for the API."""

import os
import time
from pathlib import Path
from typing import Protocol

from penstock.buffer.backlog import BufferBacklog, BufferFile
from penstock.buffer.failed import FailedEvents
from penstock.buffer.files import KINDS, Kind
from penstock.buffer.journal import FailoverJournal
from penstock.buffer.maintenance import Maintenance
from penstock.buffer.qos0 import Qos0
from penstock.buffer.replay import BufferReplay, Progress
from penstock.contract.broker import BufferStatus, FileStatus, KindStatus, Recovery
from penstock.metrics import Merge, Metrics

MAX_FILES = 200  # listed in a status


class BufferParts(Protocol):
    """The parts of `Buffer` that have figures."""

    directory: Path
    journal: FailoverJournal
    qos0: Qos0
    backlog: BufferBacklog
    failed: FailedEvents
    replay: BufferReplay
    maintenance: Maintenance
    recovering: Progress | None

    @property
    def healthy(self) -> bool: ...


class BufferFigures:
    """The figures of a buffer."""

    def __init__(self, buffer: BufferParts, metrics: Metrics) -> None:
        self._buffer = buffer

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
            read=lambda: buffer.failed.events,
        )
        metrics.gauge(
            "penstock_buffer_held_partitions",
            "Partitions with buffered events; new pushes to them are buffered too",
            read=lambda: buffer.backlog.held_partitions,
        )
        metrics.gauge(
            "penstock_buffer_replay_rate",
            "Events replayed per second",
            read=lambda: buffer.replay.rate,
        )
        metrics.gauge(
            "penstock_buffer_maintenance",
            "1 while maintenance mode is on, for pushes or pops",
            "mode",
            read=self._modes,
            merge="max",
        )

    def _modes(self) -> dict[tuple[str, ...], float]:
        modes = self._buffer.maintenance.modes
        return {("push",): int(modes.push), ("pop",): int(modes.pop)}

    @property
    def pending(self) -> int:
        return sum(self.kind(kind).pending for kind in KINDS)

    @property
    def bytes(self) -> int:
        buffer = self._buffer
        files = [*buffer.journal.files, *buffer.qos0.files, *buffer.backlog.files]
        return sum(file.size for file in files) + buffer.failed.size

    def kind(self, kind: Kind) -> KindStatus:
        buffer = self._buffer
        growing = buffer.journal if kind == "failover" else buffer.qos0
        files = buffer.backlog.files_of(kind) + growing.files
        unwritten = buffer.journal.unwritten if kind == "failover" else 0
        oldest = min((file.name.created_at for file in files if file.name.created_at), default=None)
        return KindStatus(
            pending=unwritten + sum(file.events - file.done for file in files),
            files=len(files),
            bytes=sum(file.size for file in files),
            oldest_age=0.0 if oldest is None else round(max(0.0, time.time() - oldest), 3),
            flushed=int(buffer.replay.flushed.value(kind)),
        )

    def files(self) -> list[FileStatus]:
        buffer = self._buffer
        files = [_file(file, "failed", file.reason) for file in buffer.failed.files.values()]
        files += [_file(file, "waiting") for file in buffer.backlog.files[:MAX_FILES]]
        files += [_file(file, "growing") for file in buffer.qos0.files + buffer.journal.files]
        return sorted(files, key=lambda file: -(file.age or 0.0))[:MAX_FILES]

    def _drain_seconds(self) -> float | None:
        if not self.pending:
            return 0.0
        rate = self._buffer.replay.rate
        return round(self.pending / rate, 1) if rate > 0 else None

    def report(self) -> BufferStatus:
        buffer = self._buffer
        progress = buffer.recovering
        return BufferStatus(
            pending=self.pending,
            failed=buffer.failed.events,
            db_healthy=buffer.healthy,
            worker=os.getpid(),
            maintenance_mode=buffer.maintenance.modes.push,
            pop_maintenance_mode=buffer.maintenance.modes.pop,
            held_partitions=buffer.backlog.held_partitions,
            replay_rate=round(buffer.replay.rate, 1),
            quarantined=int(buffer.replay.quarantined.value()),
            failed_files=sorted(buffer.failed.files),
            directory=str(buffer.directory),
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
