"""Connections for those who look: listings, status, analytics, traces.

Such a statement may read much and take long. On connections of its own, few and with a shorter
limit, it cannot keep pushes and pops from theirs. Who finds all of them in use waits a little and
is then refused with a clear text.
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
    """`connect` opens a connection, as `Connector.connect` does."""

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
            self._pool.terminate()  # nothing here can be left half done

    async def fetch(self, sql: str, *args: Any) -> list[Any]:
        """Run one statement that only reads. A lost connection raises what the driver raises."""
        assert self._pool is not None
        try:
            await asyncio.wait_for(self._turns.acquire(), WAIT_SECONDS)
        except TimeoutError:
            raise Busy(
                f"{self._settings.browse_pool_size} other requests are reading from the database "
                "and take long; try again later"
            ) from None
        try:
            limit, patience = self._settings.browse_timeout, self._settings.acquire_timeout
            async with self._pool.acquire(timeout=patience) as connection:
                # The server's own limit comes first, unless the server hangs.
                rows: list[Any] = await connection.fetch(
                    sql, *args, timeout=limit + patience if limit else None
                )
                return rows
        except asyncpg.DataError as error:
            raise unusable(error) from error
        except asyncpg.QueryCanceledError as error:
            raise Busy(
                f"reading this took longer than {limit:g} s (database.browse_timeout); ask for less"
            ) from error
        finally:
            self._turns.release()


def unusable(error: asyncpg.DataError) -> InvalidRequest:
    """A value that PostgreSQL cannot take is the asker's mistake."""
    log.info("the database refused a value: %s", error)
    return InvalidRequest("a value of this request cannot be stored or looked for")


async def keep_session(connection: Any) -> None:
    """Instead of asyncpg's reset on release, a round trip per call: our sessions have no state."""
