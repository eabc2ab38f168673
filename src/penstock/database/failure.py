"""Why PostgreSQL cannot be used, so that one knows what to do about it.

A connection pooler such as PgBouncer is one of the reasons. The broker's statements rely on what
its sessions were opened with (`search_path`, what the planner may use), it listens for
notifications, and it keeps prepared statements. A pooler hands each transaction to another session
and drops or refuses the settings. The broker has a pool of its own, so a pooler gains nothing.
"""

import errno
import socket

import asyncpg

POOLER = (
    "a connection pooler (such as PgBouncer) answers there, which keeps no sessions: "
    "name PostgreSQL itself. The broker has a pool of its own (database.pool_size)"
)
NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)


class Pooled(ConnectionError):
    """The session does not have the settings that it was opened with."""

    def __init__(self) -> None:
        super().__init__(POOLER)


def is_pooler(error: BaseException) -> bool:
    """PgBouncer says so when it is asked for settings that it does not pass on."""
    return isinstance(error, Pooled) or (
        isinstance(error, asyncpg.PostgresError) and "unsupported startup parameter" in str(error)
    )


def explain(error: BaseException) -> str:
    """Describe the failure and, where it helps, what to check. The caller names the host."""
    text = str(error) or type(error).__name__
    if is_pooler(error):
        return POOLER
    if isinstance(error, socket.gaierror):
        return f"no such host ({error.strerror})"
    if isinstance(
        error, asyncpg.InvalidPasswordError | asyncpg.InvalidAuthorizationSpecificationError
    ):
        return f"{text} (check the user and the password of the URL)"
    if isinstance(error, asyncpg.InvalidCatalogNameError):
        return f"{text} (create it, or name another one in the URL)"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused (does PostgreSQL run there?)"
    if isinstance(error, FileNotFoundError):
        return "no server listens at that socket (does PostgreSQL run there?)"
    if isinstance(error, OSError) and error.errno in NO_ROUTE:
        return "the host cannot be reached (is the address right?)"
    return text
