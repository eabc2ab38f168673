"""The buffer: its files, the progress of their replay, and the maintenance modes."""

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


class MaintenanceModes(msgspec.Struct):
    """The maintenance modes to turn on or off. Those that are absent stay as they are."""

    push: bool | None = None  # pushes go to the buffer
    pop: bool | None = None  # pops return no messages
