"""The broker: its health, its buffer and its audit log."""

from typing import Any, Literal

import msgspec

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class BrokerStatus(msgspec.Struct, kw_only=True):
    """The health of a broker, as reported by `/health`."""

    status: str  # healthy, degraded (the disk of topics is full) or unhealthy (database down)
    database: str
    database_host: str = ""  # the one in use; "" while there is none
    # why it is down, or that another host takes writes too; "" when all is well
    database_problem: str = ""
    disk: str = "ok"  # of the topics: ok, or why appends are refused
    server: str
    worker_id: int = 0
    version: str
    uptime: float
    listeners: dict[str, str] = msgspec.field(default_factory=dict)
    member: str = ""  # the name of the process that answers
    waiting_pops: int = 0
    # requests that wait to share a call to the database, by kind
    merging: dict[str, float] = msgspec.field(default_factory=dict)


class BrokerReady(msgspec.Struct):
    """Whether a broker serves requests."""

    status: str  # starting, ready, draining, unavailable
    database: str


class ReadyQuery(msgspec.Struct, frozen=True):
    database: Literal["optional", "required"] = "optional"


class Alive(msgspec.Struct):
    status: str = "alive"


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


class AuditEntry(msgspec.Struct):
    """A change: who made it, when, and to what."""

    at: float  # milliseconds since 1970
    who: str
    action: str
    object: str
    detail: dict[str, Any]


class AuditPage(msgspec.Struct):
    entries: list[AuditEntry]
    next: int | None  # `before` of the next page; None: these were the last
