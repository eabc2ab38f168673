"""The broker's connections to PostgreSQL, and the one opinion on whether it is up.

Everything that wants the database asks here, so that "down" is decided once and acted on at once:

- A connection error or an acquire that takes too long makes us *suspect* the server. One probe on a connection of its
  own (shared by all who suspect at that moment) settles it: it answers, and the error was that connection's alone
  (somebody ran `pg_terminate_backend`), or it does not, and the database is down.
- A server that is frozen rather than gone closes nothing. While calls are in flight and none has finished for
  `acquire_timeout`, a watchdog probes; when the probe fails the calls are cut off.
- A server that takes no writes (a standby, `default_transaction_read_only`) is of no use to a queue: it counts as down.
  One whose disk is full does answer; its calls fail with `Busy`, and nobody concludes anything from it.
- While down nobody waits: calls fail with `Unavailable` immediately, and one task probes with growing pauses (0.1 s to
  1 s). The first probe that succeeds migrates the schema if that is still to be done, and tells those who asked.

A call cut off in the middle may have been committed. Callers treat `Unavailable` as "unknown", never as "not done".
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import asyncpg

from penstock.config import schema
from penstock.database.embedded import EmbeddedPostgres
from penstock.database.migrate import migrate
from penstock.errors import Busy, ConnectionLost, InvalidRequest, PenstockError, Unavailable
from penstock.metrics import Metrics

log = logging.getLogger("penstock.database")
T = TypeVar("T")

GONE = (  # what a call meets when its connection or the server behind it is lost
    ConnectionError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,  # asyncpg's word for using a connection that was closed meanwhile
    asyncpg.InternalClientError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.ReadOnlySQLTransactionError,  # the server we are on became a standby
)
NO_ROOM = (asyncpg.DiskFullError, asyncpg.PostgresSystemError)  # its disk is full or fails; it may still answer reads
UNREACHABLE = (*GONE, OSError)  # what opening a connection meets: no socket, no route, no such host
PROBE_PAUSES = (0.1, 0.2, 0.4, 0.7, 1.0)
WATCH_INTERVAL = 0.25
LISTEN_CHECK = 15.0
UNDONE = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)  # rolled back as a whole: safe to run again
TRIES = 6  # how often that is done
READS = 4  # how often a read is tried when its connection is lost
KEPT = 8  # connections kept at hand between calls


class Database:
    """A pool on the configured PostgreSQL, or on the embedded one when none is configured."""

    def __init__(self, settings: schema.Database, private_directory: Path, metrics: Metrics) -> None:
        self.settings = settings
        self.url = url_of(settings)
        self.embedded = None if self.url else EmbeddedPostgres(private_directory / "postgres")
        if self.embedded:
            self.url = self.embedded.url
        self.healthy = False
        self._pool: asyncpg.Pool | None = None
        self._migrated = False
        self._callbacks: list[Callable[[bool], None]] = []
        self._kept: list[Any] = []  # connections of calls that have just ended, for the next ones
        self._queueing = 0  # calls that wait for the pool: they come before `_kept`
        self._in_flight: set[asyncpg.Connection] = set()
        self._last_progress = time.monotonic()
        self._probing: asyncio.Task[bool] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._down_since: float | None = None
        metrics.gauge("penstock_database_up", "1 while PostgreSQL answers", read=lambda: int(self.healthy), merge="max")
        metrics.gauge("penstock_database_pool_size", "Open connections", read=lambda: self.pool_size)
        metrics.gauge("penstock_database_in_flight", "Calls being executed", read=lambda: len(self._in_flight))
        self._outages = metrics.counter("penstock_database_outages_total", "Times PostgreSQL was found down")

    @property
    def pool_size(self) -> int:
        return self._pool.get_size() if self._pool else 0

    @property
    def pool_idle(self) -> int:
        return self._pool.get_idle_size() + len(self._kept) if self._pool else 0

    async def start(self) -> None:
        """Start the embedded server if it is ours, then connect. A server that is down is not an error here."""
        if self.embedded:
            began = time.monotonic()
            done = await asyncio.to_thread(self.embedded.start)
            log.info(
                "embedded PostgreSQL %s in %.1f s (process %s)", done, time.monotonic() - began, self.embedded.pid()
            )
        self._pool = await asyncpg.create_pool(
            self.url,
            min_size=0,
            max_size=self.settings.pool_size,
            reset=_keep_session,
            **self._connection_options(),
        )
        if not await self._probe():
            log.warning("PostgreSQL does not answer; starting without it")
            self._went_down()
        self._keep(self._watch())

    async def stop(self) -> None:
        for task in (*self._tasks, *([self._probing] if self._probing else [])):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._pool:
            await self._release_kept()
            try:
                await asyncio.wait_for(self._pool.close(), timeout=5)
            except (*GONE, asyncio.CancelledError):
                self._pool.terminate()
        if self.embedded:
            await asyncio.to_thread(self.embedded.stop)
        self.healthy = False

    def on_change(self, callback: Callable[[bool], None]) -> None:
        """Call `callback(healthy)` each time the database goes down or comes back."""
        self._callbacks.append(callback)

    async def fetch(self, sql: str, *args: Any, timeout: float | None = None) -> list[asyncpg.Record]:
        """Run one statement and return its rows; again when it lost a deadlock, for then nothing of it was done."""
        for turn in range(TRIES):
            try:
                async with self.connection() as connection:
                    rows: list[asyncpg.Record] = await connection.fetch(sql, *args, timeout=timeout)
                    return rows
            except UNDONE:
                await asyncio.sleep(0.02 * turn)
        raise Busy("the database is too busy")

    async def transact(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Run `work(connection)` in a transaction, again from the start when it lost a deadlock.

        `work` must use that connection only. Asking for a second one while this one holds locks can wait for ever: the
        database sees no deadlock when half of it is in here.
        """
        for turn in range(TRIES):
            try:
                async with self.connection() as connection, connection.transaction():
                    return await work(connection)
            except UNDONE:
                await asyncio.sleep(0.02 * turn)
        raise Busy("the database is too busy")

    async def read(self, sql: str, *args: Any) -> list[asyncpg.Record]:
        """`fetch` for what may run twice: when only its connection was lost, it is asked again on another.

        A value that PostgreSQL cannot take (a NUL in a name, a year it has no room for) is the asker's mistake.
        """
        for turn in range(READS):
            try:
                return await self.fetch(sql, *args)
            except ConnectionLost:
                if turn == READS - 1:
                    raise
            except asyncpg.DataError as error:
                log.info("the database refused a value: %s", error)
                raise InvalidRequest("a value of this request cannot be stored or looked for") from error
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """An asyncpg connection from the pool. Session state must not be changed on it (SET LOCAL is fine)."""
        if not self.healthy or self._pool is None:
            raise Unavailable("the database is down")
        proxy = await self._acquire() if self._queueing or not self._kept else self._kept.pop()
        while proxy._con is None or proxy._con.is_closed():  # lost while it was kept
            await self._release(proxy)
            proxy = await self._acquire()
        connection = proxy._con
        whole = False
        if not self._in_flight:
            self._last_progress = time.monotonic()
        self._in_flight.add(connection)
        try:
            yield proxy
            whole = True
        except GONE as error:
            if isinstance(error, asyncpg.InterfaceError) and not connection.is_closed():
                raise  # a wrong argument, not a lost connection
            raise await self._suspect(error) from error
        except asyncpg.QueryCanceledError as error:
            raise Busy("the database took too long") from error
        except NO_ROOM as error:
            log.error("PostgreSQL: %s", error)
            raise Busy("the database cannot write") from error
        finally:
            self._in_flight.discard(connection)
            self._last_progress = time.monotonic()
            if whole and self.healthy and not self._queueing and len(self._kept) < KEPT:
                self._kept.append(proxy)  # handing it to the pool and back costs more than a small call
            else:
                await self._release(proxy)

    async def listen(self, channel: str, callback: Callable[[str | None], None]) -> None:
        """Call back with each payload notified on `channel`, for ever; with None after every (re)connect."""
        self._keep(self._listen(channel, callback))

    async def probe(self) -> bool:
        """Ask the server whether it answers, now. Shared with whoever else asks at this moment."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        return await asyncio.shield(self._probing)

    async def _acquire(self) -> Any:
        assert self._pool is not None
        self._queueing += 1
        try:
            return await self._pool.acquire(timeout=self.settings.acquire_timeout)
        except UNREACHABLE as error:
            raise await self._suspect(error) from error
        finally:
            self._queueing -= 1

    async def _release_kept(self) -> None:
        """The pool closes what is idle for long or has served for long; it must see them for that."""
        kept, self._kept = self._kept, []
        for proxy in kept:
            await self._release(proxy)

    async def _release(self, proxy: Any) -> None:
        assert self._pool is not None
        try:
            await self._pool.release(proxy, timeout=self.settings.acquire_timeout)
        except GONE:
            pass  # the connection is lost either way; the pool opens another when it needs one

    async def _suspect(self, error: BaseException) -> Unavailable:
        if not self.healthy:  # decided already: this call was cut off, and asking again would take its time
            return Unavailable("the database is down")
        if await self.probe():
            return ConnectionLost(f"a database connection was lost ({type(error).__name__})")
        self._went_down()
        return Unavailable("the database is down")

    async def _probe(self) -> bool:
        limit = self.settings.acquire_timeout
        try:
            connection = await asyncpg.connect(self.url, timeout=limit, **self._connection_options())
        except UNREACHABLE:
            return False
        except asyncpg.PostgresError as error:
            log.warning("PostgreSQL refuses us: %s", error)
            return False
        try:
            if not self._migrated:
                await migrate(connection, self.settings.db_schema)
                self._migrated = True
            if await connection.fetchval("SHOW transaction_read_only", timeout=limit) == "on":
                if self._down_since is None:
                    log.warning("PostgreSQL takes no writes (a standby, or set to read only): that counts as down")
                return False
        except GONE:
            return False
        finally:
            connection.terminate()
        self._came_up()
        return True

    def _came_up(self) -> None:
        if self.healthy:
            return
        self.healthy = True
        if self._down_since is not None:
            log.info("PostgreSQL recovery detected after %.1f s", time.monotonic() - self._down_since)
            self._down_since = None
        for callback in self._callbacks:
            callback(True)

    def _went_down(self) -> None:
        if self._down_since is not None:
            return
        self.healthy = False
        self._down_since = time.monotonic()
        self._outages.add()
        log.warning("Database connection failed: PostgreSQL is down; %d calls in flight", len(self._in_flight))
        for connection in list(self._in_flight):
            connection.terminate()
        for callback in self._callbacks:
            callback(False)
        self._keep(self._wait_for_recovery())

    async def _wait_for_recovery(self) -> None:
        turn = 0
        while not self.healthy:
            await asyncio.sleep(PROBE_PAUSES[min(turn, len(PROBE_PAUSES) - 1)])
            turn += 1
            if self.embedded and self.embedded.pid() is None:
                log.warning("the embedded PostgreSQL is gone; starting it again")
                try:
                    await asyncio.to_thread(self.embedded.start)
                except PenstockError as error:
                    log.error("%s", error)
            try:
                await self.probe()
            except (PenstockError, asyncpg.PostgresError) as error:
                log.error("the database answers but its schema cannot be prepared: %s", error)

    async def _watch(self) -> None:
        """Find the server that is frozen: calls in flight, and none of them finishes."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL)
            await self._release_kept()
            stuck_for = time.monotonic() - self._last_progress
            if (
                self.healthy
                and self._in_flight
                and stuck_for > self.settings.acquire_timeout
                and not await self.probe()
            ):
                self._went_down()

    async def _listen(self, channel: str, callback: Callable[[str | None], None]) -> None:
        while True:
            try:
                connection = await asyncpg.connect(
                    self.url, timeout=self.settings.acquire_timeout, **self._connection_options()
                )
            except (*UNREACHABLE, asyncpg.PostgresError):
                await asyncio.sleep(PROBE_PAUSES[-1])
                continue
            lost = asyncio.Event()
            connection.add_termination_listener(lambda _, lost=lost: lost.set())
            try:
                await connection.add_listener(channel, lambda *event: callback(event[3]))
                callback(None)
                while not lost.is_set():
                    try:
                        await asyncio.wait_for(lost.wait(), LISTEN_CHECK)
                    except TimeoutError:  # silent for long: is the other end still there?
                        await connection.execute("SELECT 1", timeout=self.settings.acquire_timeout)
            except (*GONE, asyncpg.PostgresError):
                pass  # the loop connects again and says so by calling back with None
            finally:
                connection.terminate()

    def _connection_options(self) -> dict[str, Any]:
        server_settings = {
            "search_path": self.settings.db_schema,
            "application_name": "penstock",
            "timezone": "UTC",
            "jit": "off",
            # Every hot statement has its index; statistics of a table that grows by the second must not talk the
            # planner into reading all of it.
            "enable_seqscan": "off",
            "enable_bitmapscan": "off",
            "max_parallel_workers_per_gather": "0",
        }
        if self.settings.statement_timeout:
            server_settings["statement_timeout"] = str(int(self.settings.statement_timeout * 1000))
        return {"server_settings": server_settings}

    def _keep(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _keep_session(connection: Any) -> None:
    """Instead of asyncpg's reset on release, a round trip per call: our sessions have no state to reset."""


def url_of(settings: schema.Database) -> str:
    """The configured URL, or one made from host, port, name, user and password; empty when none is configured."""
    if settings.url or not settings.host:
        return settings.url
    account = quote(settings.user, safe="")
    if settings.password:
        account += ":" + quote(settings.password, safe="")
    hosts = ",".join(
        host if ":" in host else f"{host}:{settings.port}" for host in map(str.strip, settings.host.split(","))
    )
    return f"postgresql://{account}@{hosts}/{quote(settings.name, safe='')}"
