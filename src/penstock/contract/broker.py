"""The broker itself."""

from typing import Literal

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
