"""The buffer: its files, the progress of their replay, and the maintenance modes."""

from typing import ClassVar

import msgspec


class KindStatus(msgspec.Struct, rename="camel"):
    """Buffer files of one kind, being written or waiting for replay."""

    pending: int
    files: int
    bytes: int
    oldest_age: float  # seconds since the oldest file was begun; 0 = no file
    flushed: int  # events committed since the start


class Recovery(msgspec.Struct):
    what: str
    done: int
    total: int


class FileStatus(msgspec.Struct, rename="camel"):
    """One buffer file."""

    name: str
    kind: str
    events: int
    bytes: int
    age: float | None  # seconds since it was begun
    state: str  # growing, waiting (for its replay) or failed
    reason: str | None  # of a failed one: why its first event was refused


class BufferStatus(msgspec.Struct, rename="camel"):
    pending: int
    failed: int
    db_healthy: bool
    worker: int  # process id: each process has files of its own
    maintenance_mode: bool
    pop_maintenance_mode: bool
    held_partitions: int
    replay_rate: float  # events per second, over the last ten seconds
    quarantined: int
    failed_files: list[str]
    directory: str
    files: list[FileStatus]  # of this process, the oldest first, MAX_FILES of them
    drain_seconds: float | None  # until all is replayed, at the rate of now; null: not known
    recovery: Recovery | None
    failover: KindStatus
    qos0: KindStatus


class Switch(msgspec.Struct):
    enabled: bool

    texts: ClassVar[dict[str, str]] = {"enabled": "enabled (boolean) is required"}


class FailedFiles(msgspec.Struct, rename="camel"):
    count: int
    total_bytes: int
    failover_count: int
    qos0_count: int


class BufferStats(msgspec.Struct, rename="camel"):
    pending_count: int
    failed_count: int
    db_healthy: bool
    failed_files: FailedFiles


class MaintenanceAnswer(msgspec.Struct, rename="camel", omit_defaults=True):
    maintenance_mode: bool
    pop_maintenance_mode: bool
    buffered_messages: int
    buffer_healthy: bool
    buffer_stats: BufferStats
    message: str = ""


class PopMaintenanceAnswer(msgspec.Struct, rename="camel"):
    pop_maintenance_mode: bool
    message: str


class Retried(msgspec.Struct):
    tried: int
    failed: int
