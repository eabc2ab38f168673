"""The broker's connections to PostgreSQL, for those who call it. `health` says whether it is up.

While it is down nobody waits: calls fail with `Unavailable` immediately. A call cut off in the
middle may have been committed. Callers treat `Unavailable` as "unknown", never as "not done".
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import asyncpg

from penstock.config import schema
from penstock.config.database_url import EMBEDDED, url_of
from penstock.database.browse import BrowsePool, unusable
from penstock.database.connector import Connector
from penstock.database.embedded import EmbeddedPostgres
from penstock.database.health import GONE, UNREACHABLE, DatabaseHealth
from penstock.database.migrate import SchemaFiles, drop_unused_functions
from penstock.database.notifications import Notifications
from penstock.database.pool import Pool
from penstock.database.retry import ATTEMPTS, UNDONE, UNDONE_SECONDS
from penstock.database.standby import Standby
from penstock.errors import Busy, ConnectionLost, Unavailable
from penstock.io.tasks import supervised
from penstock.metrics import Metrics

log = logging.getLogger("penstock.database")
T = TypeVar("T")

# Its disk is full or fails; it may still answer reads.
NO_ROOM = (asyncpg.DiskFullError, asyncpg.PostgresSystemError)
WATCH_SECONDS = 0.25


class Checkout:
    """A connection of the pool for the time of an `async with`, and what an error on it means."""

    __slots__ = ("_connection", "_database")

    def __init__(self, database: "Database") -> None:
        self._database = database

    async def __aenter__(self) -> Any:
        database = self._database
        if not database.healthy:
            raise Unavailable("the database is down")
        try:
            self._connection = await database._pool.acquire()
        except UNREACHABLE as error:
            raise await database._health.suspect(error) from error
        database._active.set()
        return self._connection

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        database, connection = self._database, self._connection
        try:
            if isinstance(error, GONE):
                if not isinstance(error, asyncpg.InterfaceError) or connection.is_closed():
                    raise await database._health.suspect(error) from error
                # otherwise a wrong argument, not a lost connection
            elif isinstance(error, asyncpg.QueryCanceledError):
                raise Busy("the database took too long") from error
            elif isinstance(error, NO_ROOM):
                log.error("PostgreSQL: %s", error)
                raise Busy("the database cannot write") from error
        finally:
            # an error that the server reported leaves the connection as it was
            usable = error is None or isinstance(error, asyncpg.PostgresError)
            database._pool.release(connection, usable=usable and database.healthy)


class Database:
    """A pool on the configured PostgreSQL, or on the embedded one when none is configured."""

    def __init__(
        self,
        settings: schema.DatabaseSettings,
        private_directory: Path,
        metrics: Metrics,
        sql: SchemaFiles,
    ) -> None:
        self.settings = settings
        self._sql = sql
        self.url = url_of(settings)
        self.embedded = (
            None
            if self.url
            else EmbeddedPostgres(private_directory / EMBEDDED, home=private_directory)
        )
        if self.embedded:
            self.url = self.embedded.url
        self.healthy = False  # what `Health.up` says: every push asks
        self._connector = Connector(settings, self.url, sql.search_path(settings.db_schema))
        self._pool = Pool(self._connector.connect, settings.pool_size, settings.acquire_timeout)
        self._browsing = BrowsePool(settings, self._connector.connect)
        self._standby = (
            Standby(settings, sql.search_path(settings.db_schema), lambda: self._connector.server)
            if settings.read_url
            else None
        )
        self.metrics = metrics  # of the broker, for the parts that use this database
        self._active = asyncio.Event()  # there may be calls in flight
        self._watching: asyncio.Task[None] | None = None
        self._health = DatabaseHealth(
            settings, self._connector, self.embedded, sql, metrics, lambda: len(self._pool.used)
        )
        self._notifications = Notifications(settings, self._connector, self._health, metrics)
        self.on_change(self._set_healthy)
        metrics.gauge(
            "penstock_database_pool_size",
            "Open connections in the broker's pool",
            read=lambda: self.pool_size,
        )
        metrics.gauge(
            "penstock_database_in_flight",
            "SQL calls of this broker in flight",
            read=lambda: len(self._pool.used),
        )

    def _set_healthy(self, healthy: bool) -> None:
        self.healthy = healthy

    def on_change(self, callback: Callable[[bool], None]) -> None:
        """Call back whenever the database goes down or is back."""
        self._health.on_change(callback)

    async def recovered(self) -> None:
        """Return when the database is up."""
        await self._health.recovered()

    async def listen(self, channel: str, callback: Callable[[str | None], None]) -> None:
        """Call back with each payload on `channel`, and with None after every (re)connect."""
        await self._notifications.listen(channel, callback)

    @property
    def problem(self) -> str:
        """Why the database is down; while it is up, what is wrong with its other hosts."""
        return self._health.problem

    @property
    def identity(self) -> int | None:
        """Which database it is, by the number its schema gave it; None: it was never reached."""
        return self._health.identity

    @property
    def pool_size(self) -> int:
        return self._pool.size

    @property
    def host(self) -> str:
        """The host in use; empty while the database is down."""
        server = self._connector.server
        return server.host.name if server and self.healthy else ""

    @property
    def pool_idle(self) -> int:
        return self._pool.idle

    async def start(self) -> None:
        """Start the embedded server, if any, then connect. A server may be down."""
        if self.embedded:
            began = time.monotonic()
            done = await asyncio.to_thread(self.embedded.start)
            log.info(
                "embedded PostgreSQL %s in %.1f s (process %s)",
                done,
                time.monotonic() - began,
                self.embedded.pid(),
            )
        await self._browsing.start()
        if self._standby:
            await self._standby.start()
        await self._health.start()
        self._watching = supervised("database watchdog", self._watch, self.metrics)

    async def stop(self) -> None:
        if self._watching:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._notifications.stop()
        await self._health.stop()
        await self._browsing.stop()
        if self._standby:
            await self._standby.stop()
        await self._pool.close()
        self._connector.close()
        if self.embedded:
            await asyncio.to_thread(self.embedded.stop)
        self.healthy = self._health.up = False

    async def fetch(self, sql: str, *args: Any) -> list[asyncpg.Record]:
        """Run one statement; again when it lost a deadlock, for then nothing of it was done."""
        for attempt in range(ATTEMPTS):
            try:
                async with Checkout(self) as connection:
                    rows: list[asyncpg.Record] = await connection.fetch(sql, *args)
                    return rows
            except UNDONE:
                await asyncio.sleep(UNDONE_SECONDS * attempt)
        raise Busy("the database is too busy")

    async def transact(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Run `work(connection)` in a transaction, again from the start when it lost a deadlock.

        `work` must use that connection only. Asking for a second one while this one holds locks can
        wait for ever: the database sees no deadlock when half of it is in here.
        """
        for attempt in range(ATTEMPTS):
            try:
                async with self.connection() as connection, connection.transaction():
                    return await work(connection)
            except UNDONE:
                await asyncio.sleep(UNDONE_SECONDS * attempt)
        raise Busy("the database is too busy")

    async def read(self, sql: str, *args: Any) -> list[asyncpg.Record]:
        """`fetch` for what may run twice: when only its connection was lost, it is asked again on
        another.

        A value that PostgreSQL cannot take (a NUL in a name, a year it has no room for) is the
        asker's mistake.
        """
        for attempt in range(ATTEMPTS):
            try:
                return await self.fetch(sql, *args)
            except ConnectionLost:
                if attempt == ATTEMPTS - 1:
                    raise
            except asyncpg.DataError as error:
                raise unusable(error) from error
        raise AssertionError("unreachable")

    async def browse_standby(
        self, sql: str, *args: Any
    ) -> tuple[list[asyncpg.Record], float | None]:
        """`browse` on the standby of `database.read_url`: the rows, and how many seconds old they
        may be. None: they are the primary's.
        """
        if self._standby is not None:
            rows = await self._standby.read(sql, *args)
            if rows is not None:
                return rows
        return await self.browse(sql, *args), None

    async def browse(self, sql: str, *args: Any) -> list[asyncpg.Record]:
        """`read` for those who look (listings, status, analytics), on connections of their own.

        However slow that is and however many do it, the connections of pushes and pops stay free.
        """
        for attempt in range(ATTEMPTS):
            if not self.healthy:
                break
            try:
                return await self._browsing.fetch(sql, *args)
            except GONE as error:
                lost = await self._health.suspect(error)
                if attempt == ATTEMPTS - 1 or not isinstance(lost, ConnectionLost):
                    raise lost from error
        raise Unavailable("the database is down")

    def connection(self) -> Checkout:
        """An asyncpg connection from the pool, for an `async with`. Session state must not be
        changed on it (SET LOCAL is fine).
        """
        return Checkout(self)

    async def drop_unused_functions(self) -> list[str]:
        """Drop the SQL functions of releases that no broker was seen of for long."""
        async with self.connection() as connection:
            return await drop_unused_functions(connection, self.settings.db_schema, self._sql)

    async def _watch(self) -> None:
        """Find the server that is frozen or does not commit: a call in flight does not finish."""
        next_probe = 0.0
        while True:
            await self._active.wait()
            await asyncio.sleep(WATCH_SECONDS)
            if not self._pool.used:
                self._active.clear()
                continue
            now = time.monotonic()
            oldest = min(self._pool.used.values(), default=now)
            # Half, so that a push waits for little more than one limit until it is buffered.
            if (
                self.healthy
                and now - oldest > self.settings.acquire_timeout / 2
                and now >= next_probe
            ):
                # a long statement does not justify a commit each time
                next_probe = now + self.settings.acquire_timeout
                if not await self._health.probe():
                    self._health.went_down()
