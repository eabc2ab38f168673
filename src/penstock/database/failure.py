"""Explain why PostgreSQL cannot be used, and what to do about it.

A connection pooler such as PgBouncer is one of the reasons. The broker relies on the settings of
its sessions (`search_path`, planner options), listens for notifications and keeps prepared
statements. A pooler gives each transaction to another session, and drops or refuses the settings.
The broker has a pool of its own, so a pooler has no benefit.
"""

import errno
import socket

import asyncpg

POOLER = (
    "a connection pooler (such as PgBouncer) answers there and does not keep sessions: "
    "name PostgreSQL itself. The broker has a pool of its own (database.pool_size)"
)
NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)


class Pooled(ConnectionError):
    """The session does not have the settings that it was opened with."""

    def __init__(self) -> None:
        super().__init__(POOLER)


def is_pooler(error: BaseException) -> bool:
    """Return whether the error is from a pooler: PgBouncer refuses unsupported settings."""
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
