"""The connections of read-only requests: listings, status, analytics, traces.

Their statements may read much and take long. They run on a few connections of their own with a
shorter time limit, so they never take a connection from pushes and pops. If all of these
connections are in use, a request waits up to `WAIT_SECONDS` and then fails with `Busy`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import asyncpg

from penstock.config import schema
from penstock.database.pool import IDLE_SECONDS
from penstock.errors import Busy, InvalidRequest

log = logging.getLogger("penstock.database")

WAIT_SECONDS = 2.0


class BrowsePool:
    """A pool for reading. `connect` opens a connection, as `Connector.connect` does."""

    def __init__(
        self, settings: schema.DatabaseSettings, connect: Callable[..., Awaitable[Any]]
    ) -> None:
        self._settings = settings
        self._connect = partial(connect, statement_timeout=settings.browse_timeout)
        self._turns = asyncio.Semaphore(settings.browse_pool_size)
        self._pool: asyncpg.Pool | None = None

    async def start(self) -> None:
        self._pool = await asyncpg.create_pool(
            min_size=0,
            max_size=self._settings.browse_pool_size,
            max_inactive_connection_lifetime=IDLE_SECONDS,
            reset=keep_session,
            connect=self._connect,
        )

    async def stop(self) -> None:
        if self._pool:
            self._pool.terminate()  # statements only read, so they can be interrupted

    async def fetch(self, sql: str, *args: Any) -> list[Any]:
        """Run one statement that only reads. A lost connection raises the driver's error."""
        assert self._pool is not None
        try:
            await asyncio.wait_for(self._turns.acquire(), WAIT_SECONDS)
        except TimeoutError:
            raise Busy(
                f"{self._settings.browse_pool_size} other requests are reading from the database; "
                "try again later"
            ) from None
        try:
            limit, patience = self._settings.browse_timeout, self._settings.acquire_timeout
            async with self._pool.acquire(timeout=patience) as connection:
                # The server's own limit ends the statement first, unless the server hangs.
                rows: list[Any] = await connection.fetch(
                    sql, *args, timeout=limit + patience if limit else None
                )
                return rows
        except asyncpg.DataError as error:
            raise invalid_value(error) from error
        except asyncpg.QueryCanceledError as error:
            raise Busy(
                f"the query took longer than {limit:g} s (database.browse_timeout); ask for less"
            ) from error
        finally:
            self._turns.release()


def invalid_value(error: asyncpg.DataError) -> InvalidRequest:
    """Return the error for a value in a request that PostgreSQL cannot represent."""
    log.info("the database refused a value: %s", error)
    return InvalidRequest("a value of this request cannot be stored or searched for")


async def keep_session(connection: Any) -> None:
    """Skip asyncpg's reset on release, which costs a round trip: our sessions have no state."""
