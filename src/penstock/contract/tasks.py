"""Background tasks and the audit log."""

from typing import Any, Literal

import msgspec

TaskKind = Literal["requeue", "purge"]
TaskState = Literal["running", "finished", "failed", "cancelled"]


class BackgroundTask(msgspec.Struct, rename="camel"):
    """A background task and its progress."""

    id: str
    kind: TaskKind
    what: str  # the dead letters it is about, in words
    who: str
    total: int  # when it began
    exact: bool  # False: there were at least `total`
    started_at: float  # milliseconds since 1970
    done: int = 0
    state: TaskState = "running"
    error: str | None = None
    ended_at: float | None = None


class TaskList(msgspec.Struct):
    """Background tasks of all brokers on one database, newest first."""

    tasks: list[BackgroundTask]


class AuditEntry(msgspec.Struct):
    """A change: who made it, when, and to what."""

    at: float  # milliseconds since 1970
    who: str
    action: str
    object: str
    detail: dict[str, Any]


class AuditPage(msgspec.Struct):
    """Changes, newest first."""

    entries: list[AuditEntry]
    next: int | None  # `before` of the next page; None: these were the last
