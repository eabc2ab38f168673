"""Run SQL on the broker's PostgreSQL. `health` decides whether it is up.

While it is down, calls fail immediately with `Unavailable`. A call that was cut off may have been
committed, so callers treat `Unavailable` as "unknown", never as "not done".
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
from penstock.database.browse import BrowsePool, invalid_value
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

# The server's disk is full or fails; it may still answer reads.
NO_ROOM = (asyncpg.DiskFullError, asyncpg.PostgresSystemError)
WATCH_SECONDS = 0.25


class Checkout:
    """A pooled connection for the time of an `async with`. It converts errors of the connection."""

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
                # otherwise the error is a wrong argument, not a lost connection
            elif isinstance(error, asyncpg.QueryCanceledError):
                raise Busy("the database took too long") from error
            elif isinstance(error, NO_ROOM):
                log.error("PostgreSQL: %s", error)
                raise Busy("the database cannot write") from error
        finally:
            # the connection stays usable after an error that the server reported
            usable = error is None or isinstance(error, asyncpg.PostgresError)
            database._pool.release(connection, usable=usable and database.healthy)


class Database:
    """The configured PostgreSQL, or the embedded one if none is configured."""

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
        self.healthy = False  # a copy of `DatabaseHealth.up`, which every push reads
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
        """Call `callback(healthy)` each time the database goes down or comes back."""
        self._health.on_change(callback)

    async def recovered(self) -> None:
        """Wait until the database is up."""
        await self._health.recovered()

    async def listen(self, channel: str, callback: Callable[[str | None], None]) -> None:
        """Call `callback` with each payload on `channel`, and with None after every (re)connect."""
        await self._notifications.listen(channel, callback)

    @property
    def problem(self) -> str:
        """Return why the database is down or, while it is up, what is wrong with other hosts."""
        return self._health.problem

    @property
    def identity(self) -> int | None:
        """Return the number in the schema that identifies the database; None if never reached."""
        return self._health.identity

    @property
    def pool_size(self) -> int:
        return self._pool.size

    @property
    def host(self) -> str:
        """Return the host in use; empty while the database is down."""
        server = self._connector.server
        return server.host.name if server and self.healthy else ""

    @property
    def pool_idle(self) -> int:
        return self._pool.idle

    async def start(self) -> None:
        """Start the embedded server, if used, then connect. A configured server may be down."""
        if self.embedded:
            began = time.monotonic()
            done = await asyncio.to_thread(self.embedded.start)
            log.info(
                "embedded PostgreSQL %s in %.1f s (process %s)",
                done,
                time.monotonic() - began,
                self.embedded.pid(),
            )
        await self._health.start()
        self._watching = supervised("database watchdog", self._watch, self.metrics)

    async def stop(self) -> None:
        if self._watching:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._notifications.stop()
        await self._health.stop()
        self._browsing.stop()
        if self._standby:
            self._standby.stop()
        await self._pool.close()
        self._connector.close()
        if self.embedded:
            await asyncio.to_thread(self.embedded.stop)
        self.healthy = self._health.up = False

    async def fetch(self, sql: str, *args: Any) -> list[asyncpg.Record]:
        """Run one statement. Repeat it if PostgreSQL rolled it back to resolve a deadlock."""
        for attempt in range(ATTEMPTS):
            try:
                async with Checkout(self) as connection:
                    rows: list[asyncpg.Record] = await connection.fetch(sql, *args)
                    return rows
            except UNDONE:
                await asyncio.sleep(UNDONE_SECONDS * attempt)
        raise Busy("the database is too busy")

    async def transact(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Run `work(connection)` in a transaction. Repeat it if it was rolled back by a deadlock.

        `work` must use this connection only. Waiting for a second one while this one holds locks
        can last for ever: PostgreSQL does not detect a deadlock that includes waits for the pool.
        """
        for attempt in range(ATTEMPTS):
            try:
                async with self.connection() as connection, connection.transaction():
                    return await work(connection)
            except UNDONE:
                await asyncio.sleep(UNDONE_SECONDS * attempt)
        raise Busy("the database is too busy")

    async def read(self, sql: str, *args: Any) -> list[asyncpg.Record]:
        """Run a statement that may run twice. Repeat it on another connection if one is lost.

        Raises InvalidRequest for a value that PostgreSQL cannot represent (a NUL in a name, a year
        out of range).
        """
        for attempt in range(ATTEMPTS):
            try:
                return await self.fetch(sql, *args)
            except ConnectionLost:
                if attempt == ATTEMPTS - 1:
                    raise
            except asyncpg.DataError as error:
                raise invalid_value(error) from error
        raise AssertionError("unreachable")

    async def browse_standby(
        self, sql: str, *args: Any
    ) -> tuple[list[asyncpg.Record], float | None]:
        """Run `browse` on the standby of `database.read_url`. Return the rows and their maximum age
        in seconds, which is None if they are the primary's.
        """
        if self._standby is not None:
            rows = await self._standby.read(sql, *args)
            if rows is not None:
                return rows
        return await self.browse(sql, *args), None

    async def browse(self, sql: str, *args: Any) -> list[asyncpg.Record]:
        """Run a statement of a read-only request (listings, status, analytics).

        It has connections of its own, so it never takes those of pushes and pops.
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
        """Return a connection from the pool, for an `async with`. Do not change its session state
        (SET LOCAL is fine).
        """
        return Checkout(self)

    async def drop_unused_functions(self) -> list[str]:
        """Drop the SQL functions of releases of which no broker was seen for `UNUSED_DAYS`."""
        async with self.connection() as connection:
            return await drop_unused_functions(connection, self.settings.db_schema, self._sql)

    async def _watch(self) -> None:
        """Probe the server when a call takes long: it may be frozen or unable to commit."""
        next_probe = 0.0
        while True:
            await self._active.wait()
            await asyncio.sleep(WATCH_SECONDS)
            if not self._pool.used:
                self._active.clear()
                continue
            now = time.monotonic()
            oldest = min(self._pool.used.values(), default=now)
            # Half of the limit, so that a push is buffered after little more than one limit.
            if (
                self.healthy
                and now - oldest > self.settings.acquire_timeout / 2
                and now >= next_probe
            ):
                # a probe commits; a long statement must not cause one in each round
                next_probe = now + self.settings.acquire_timeout
                if not await self._health.probe():
                    self._health.went_down()
