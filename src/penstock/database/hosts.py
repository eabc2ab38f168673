"""Identify the PostgreSQL servers of the configured URL, and choose the one that the broker uses.

A URL may name several hosts, a primary and its standbys. All are asked concurrently, each with its
own time limit, so a host that hangs does not delay the others. A server is described by:

| what       | source                         | meaning                                            |
|------------|--------------------------------|----------------------------------------------------|
| `system`   | `pg_control_system()`          | the cluster, the same for primary and standbys     |
| `timeline` | name of the current WAL file   | grows by one at each promotion                     |
| `started`  | `pg_postmaster_start_time()`   | the server process                                 |
| `writable` | `transaction_read_only` is off | a primary that is not set to read only             |

A broker never returns to a lower timeline of its cluster and never changes to another cluster:
data that it has acknowledged would be missing there.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import asyncpg

from penstock.database.failure import Pooled

IDENTITY = """
SELECT (SELECT system_identifier FROM pg_control_system()) AS system,
       CASE WHEN NOT pg_is_in_recovery() THEN pg_walfile_name(pg_current_wal_lsn()) END AS wal,
       pg_postmaster_start_time() AS started,
       current_setting('transaction_read_only') = 'off' AS writable,
       current_setting('search_path') AS search_path"""
# For a role that may not read these: servers cannot be distinguished then.
ANONYMOUS = """
SELECT 0::bigint AS system, NULL::text AS wal, pg_postmaster_start_time() AS started,
       current_setting('transaction_read_only') = 'off' AS writable,
       current_setting('search_path') AS search_path"""
NOT_FOR_US = (
    asyncpg.InsufficientPrivilegeError,
    asyncpg.UndefinedFunctionError,
    asyncpg.FeatureNotSupportedError,
)
FENCE = "stop it, or make it a standby of the one in use"


@dataclass(frozen=True, slots=True)
class Host:
    """One address. `None` stands for the driver's defaults (PGHOST, the standard sockets)."""

    host: str | None
    port: int | None

    @property
    def name(self) -> str:
        if self.host is None:
            return "the default host"
        return self.host if self.port is None else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class DatabaseServer:
    """A server's identity. Two are equal if they are the same process at the same address."""

    host: Host
    system: int
    timeline: int  # 0 on a standby, or if the role may not read it
    started: datetime
    writable: bool

    def __str__(self) -> str:
        return f"{self.host.name} (timeline {self.timeline})"


@dataclass(frozen=True, slots=True)
class Sighting:
    """The result of asking a host: its server, or why it did not answer."""

    host: Host
    server: DatabaseServer | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of `choose`."""

    server: DatabaseServer | None
    reason: str = ""  # why no server can be used
    warning: str = ""  # problems of other hosts


def hosts_of(url: str) -> list[Host]:
    """Return the hosts of a URL in order. All forms of libpq and asyncpg are accepted."""
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    listed = parts.netloc.rpartition("@")[2]
    names = listed or query.get("host", [""])[-1] or os.environ.get("PGHOST", "")
    ports = query.get("port", [""])[-1].split(",")
    hosts = []
    for position, name in enumerate(names.split(",") if names else []):
        host, port = _address(name)
        given = ports[position] if len(ports) > position else ports[0]
        host = unquote(host) if listed else host
        hosts.append(Host(host, port or (int(given) if given else None)))
    return hosts or [Host(None, None)]


def _address(name: str) -> tuple[str, int | None]:
    if name.startswith("["):  # IPv6
        host, _, port = name[1:].partition("]")
        return host, int(port[1:]) if port[1:] else None
    if name.startswith("/"):
        return name, None
    host, _, port = name.partition(":")
    return host, int(port) if port else None


async def identify(connection: Any, host: Host, limit: float, search_path: str) -> DatabaseServer:
    """Identify the server of a connection that was opened with this search_path."""
    try:
        row = await connection.fetchrow(IDENTITY, timeout=limit)
    except NOT_FOR_US:
        row = await connection.fetchrow(ANONYMOUS, timeout=limit)
    if row["search_path"] != search_path:  # our setting did not reach the server
        raise Pooled
    timeline = int(row["wal"][:8], 16) if row["wal"] else 0
    return DatabaseServer(host, row["system"], timeline, row["started"], row["writable"])


def choose(sightings: Sequence[Sighting], bound: DatabaseServer | None) -> Choice:
    """Choose the server to use. `bound` is the one that this broker used last.

    The highest timeline wins. Between equals, the host in use wins, then the first in the URL.
    """
    servers = [sighting.server for sighting in sightings if sighting.server]
    writable = [server for server in servers if server.writable]
    if not bound and len({server.system for server in writable}) > 1:
        names = ", ".join(server.host.name for server in writable)
        return Choice(None, f"the hosts {names} are different PostgreSQL clusters: name only one")
    foreign = [server for server in writable if bound and server.system != bound.system]
    own = [server for server in writable if server not in foreign]
    behind = [server for server in own if bound and server.timeline < bound.timeline]
    ranked = sorted(
        (server for server in own if server not in behind),
        key=lambda one: (-one.timeline, not (bound and one.host == bound.host)),
    )
    if not ranked:
        return Choice(None, _explain_none(sightings, foreign, behind, bound))
    first = ranked[0]
    rivals = [one for one in (*ranked[1:], *behind) if not _is_same_server(one, first)]
    warnings = []
    if rivals:
        names = ", ".join(map(str, rivals))
        warnings.append(
            f"{names} accepts writes beside {first}, which is in use: "
            f"the old primary must be fenced ({FENCE})"
        )
    warnings += [f"{server.host.name} is another PostgreSQL cluster" for server in foreign]
    return Choice(first, warning="; ".join(warnings))


def _is_same_server(one: DatabaseServer, other: DatabaseServer) -> bool:
    """Return whether two addresses lead to the same server."""
    return one.system == other.system and one.started == other.started


def _explain_none(
    sightings: Sequence[Sighting],
    foreign: list[DatabaseServer],
    behind: list[DatabaseServer],
    bound: DatabaseServer | None,
) -> str:
    if bound and behind:
        names = ", ".join(map(str, behind))
        return (
            f"{names} accepts writes, but this broker has used timeline {bound.timeline} "
            f"({bound.host.name}): the old primary must be fenced ({FENCE})"
        )
    if foreign:
        names = ", ".join(server.host.name for server in foreign)
        return (
            f"{names} is another PostgreSQL cluster than the one this broker has used: "
            "restart the broker if this is intended"
        )
    read_only = "refuses writes (a standby, or set to read only)"
    return "; ".join(
        f"{one.host.name}: {read_only if one.server else one.error}" for one in sightings
    )
