"""The PostgreSQL servers of the configured URL: who they are, and which one of them the broker
works on.

A URL may name several hosts, a primary and its standbys. All of them are asked at once, each with
its own limit, so that one that hangs does not keep the others waiting. What a server says of
itself:

| what       | where from                     | what it says                                       |
|------------|--------------------------------|----------------------------------------------------|
| `system`   | `pg_control_system()`          | which cluster: equal on a primary and its standbys |
| `timeline` | name of the current WAL file   | one more after each promotion                      |
| `started`  | `pg_postmaster_start_time()`   | which server process                               |
| `writable` | `transaction_read_only` is off | a primary, and not one that was set to read only   |

`choose` says which one may be used. A broker never goes back to a lower timeline of its cluster,
and never to another cluster: what it was answered for would not be there.
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
# For a role that may not ask for those: two servers cannot be distinguished then.
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
    """One address; `None` leaves it to the driver's defaults (PGHOST, the usual sockets)."""

    host: str | None
    port: int | None

    @property
    def name(self) -> str:
        if self.host is None:
            return "the default host"
        return self.host if self.port is None else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class DatabaseServer:
    """What a host said of itself. Equal to another: the same process at the same address."""

    host: Host
    system: int
    timeline: int  # 0 on a standby, and where a role may not ask
    started: datetime
    writable: bool

    def __str__(self) -> str:
        return f"{self.host.name} (timeline {self.timeline})"


@dataclass(frozen=True, slots=True)
class Sighting:
    """What came of asking a host: its server, or why there was no answer."""

    host: Host
    server: DatabaseServer | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """The server to use, if any may be used; why none; and what is wrong beside it."""

    server: DatabaseServer | None
    reason: str = ""
    warning: str = ""


def hosts_of(url: str) -> list[Host]:
    """The hosts of a URL in their order, in all forms that libpq and asyncpg take."""
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
    """Ask the server behind a connection that was opened with this search_path who it is."""
    try:
        row = await connection.fetchrow(IDENTITY, timeout=limit)
    except NOT_FOR_US:
        row = await connection.fetchrow(ANONYMOUS, timeout=limit)
    if row["search_path"] != search_path:  # what we asked for did not reach the server
        raise Pooled
    timeline = int(row["wal"][:8], 16) if row["wal"] else 0
    return DatabaseServer(host, row["system"], timeline, row["started"], row["writable"])


def choose(sightings: Sequence[Sighting], bound: DatabaseServer | None) -> Choice:
    """The server to use. `bound` is the one this broker used last.

    The highest timeline wins; between equals the host in use, then the order of the URL.
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
        return Choice(None, _why_none(sightings, foreign, behind, bound))
    first = ranked[0]
    rivals = [one for one in (*ranked[1:], *behind) if not _same(one, first)]
    warnings = []
    if rivals:
        names = ", ".join(map(str, rivals))
        warnings.append(
            f"{names} takes writes beside {first}, which is in use: "
            f"the old primary must be fenced ({FENCE})"
        )
    warnings += [f"{server.host.name} is another PostgreSQL cluster" for server in foreign]
    return Choice(first, warning="; ".join(warnings))


def _same(one: DatabaseServer, other: DatabaseServer) -> bool:
    """Whether two addresses lead to one server."""
    return one.system == other.system and one.started == other.started


def _why_none(
    sightings: Sequence[Sighting],
    foreign: list[DatabaseServer],
    behind: list[DatabaseServer],
    bound: DatabaseServer | None,
) -> str:
    if bound and behind:
        names = ", ".join(map(str, behind))
        return (
            f"{names} takes writes, but this broker has worked on timeline {bound.timeline} "
            f"({bound.host.name}): the old primary must be fenced ({FENCE})"
        )
    if foreign:
        names = ", ".join(server.host.name for server in foreign)
        return (
            f"{names} is another PostgreSQL cluster than the one this broker has worked with: "
            "restart the broker if that is meant"
        )
    read_only = "takes no writes (a standby, or set to read only)"
    return "; ".join(
        f"{one.host.name}: {read_only if one.server else one.error}" for one in sightings
    )
