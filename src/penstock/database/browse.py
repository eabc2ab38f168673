"""The connections of read-only requests: listings, status, analytics, traces.

Their statements may read much and take long. They run on a few connections of their own with a
shorter time limit, so they never take a connection from pushes and pops. If all of these
connections are in use, a request waits up to `WAIT_SECONDS` and then fails with `Busy`.
"""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import asyncpg

from penstock.config import schema
from penstock.database.pool import AllInUse, Pool
from penstock.errors import Busy, InvalidRequest

log = logging.getLogger("penstock.database")

WAIT_SECONDS = 2.0


class BrowsePool:
    """A pool for reading. `connect` opens a connection, as `Connector.connect` does."""

    def __init__(
        self, settings: schema.DatabaseSettings, connect: Callable[..., Awaitable[Any]]
    ) -> None:
        self._settings = settings
        self._pool = Pool(
            partial(connect, statement_timeout=settings.browse_timeout),
            settings.browse_pool_size,
            WAIT_SECONDS,
        )

    def stop(self) -> None:
        self._pool.terminate()  # statements only read, so they can be interrupted

    async def fetch(self, sql: str, *args: Any) -> list[Any]:
        """Run one statement that only reads. A lost connection raises the driver's error."""
        try:
            connection = await self._pool.acquire()
        except AllInUse:
            raise Busy(
                f"{self._settings.browse_pool_size} other requests are reading from the database; "
                "try again later"
            ) from None
        limit, patience = self._settings.browse_timeout, self._settings.acquire_timeout
        usable = False
        try:
            # The server's own limit ends the statement first, unless the server hangs.
            rows: list[Any] = await connection.fetch(
                sql, *args, timeout=limit + patience if limit else None
            )
            usable = True
            return rows
        except asyncpg.PostgresError as error:
            usable = True
            if isinstance(error, asyncpg.DataError):
                raise invalid_value(error) from error
            if isinstance(error, asyncpg.QueryCanceledError):
                raise Busy(
                    f"the query took longer than {limit:g} s (database.browse_timeout); "
                    "ask for less"
                ) from error
            raise
        finally:
            self._pool.release(connection, usable=usable)


def invalid_value(error: asyncpg.DataError) -> InvalidRequest:
    """Return the error for a value in a request that PostgreSQL cannot represent."""
    log.info("the database refused a value: %s", error)
    return InvalidRequest("a value of this request cannot be stored or searched for")
