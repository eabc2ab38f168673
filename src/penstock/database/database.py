"""The broker's connections to PostgreSQL, and the one opinion on whether it is up.

Everything that wants the database asks here, so that "down" is decided once and acted on at once:

- A connection error or an acquire that takes too long makes us *suspect* the server. One probe
  (shared by all who suspect at that moment) decides: it succeeds, and the error was that
  connection's alone (somebody ran `pg_terminate_backend`), or it does not, and the database is
  down.
- A probe asks all hosts of the URL who they are, chooses one (see `hosts`) and *commits* there. A
  server that answers but cannot commit, because its synchronous standby hangs, is of no use to a
  queue.
- A server that is frozen rather than gone closes nothing, and a commit that waits looks like any
  other call. When a call is in flight for longer than half of `acquire_timeout`, a watchdog probes;
  if that fails, all calls are cut off.
- A server that takes no writes (a standby, `default_transaction_read_only`) counts as down. One
  whose disk is full does answer; its calls fail with `Busy`, and nobody concludes anything from it.
- While down nobody waits: calls fail with `Unavailable` immediately, and one task probes with
  growing pauses (0.1 s to 1 s). The first probe that succeeds migrates the schema if that is still
  to be done, and notifies those who asked.
- All connections are on one server (see `connector`). Where several hosts are configured they are
  surveyed every second; when another one was promoted, everything is cut off as if the database had
  gone down, and opened there.

A call cut off in the middle may have been committed. Callers treat `Unavailable` as "unknown",
never as "not done".
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any, TypeVar

import asyncpg

from penstock.config import schema
from penstock.config.database_url import EMBEDDED, url_of
from penstock.database.browse import IDLE_SECONDS, BrowsePool, keep_session
from penstock.database.connector import Connector
from penstock.database.embedded import EmbeddedPostgres
from penstock.database.failure import explain
from penstock.database.hosts import Server, choose
from penstock.database.migrate import SchemaFiles, drop_unused_functions, migrate
from penstock.database.standby import Standby
from penstock.errors import (
    Busy,
    ConfigError,
    ConnectionLost,
    InvalidRequest,
    PenstockError,
    Unavailable,
)
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
# Its disk is full or fails; it may still answer reads.
NO_ROOM = (asyncpg.DiskFullError, asyncpg.PostgresSystemError)
UNREACHABLE = (*GONE, OSError)  # what opening a connection meets: no socket, no route, no such host
PROBE_SECONDS = (0.1, 0.2, 0.4, 0.7, 1.0)
WATCH_SECONDS = 0.25
SURVEY_SECONDS = 1.0
# Writes WAL and nothing else, in no table: its commit waits for what every commit waits for.
COMMIT = "SELECT pg_logical_emit_message(true, 'penstock', 'probe')"
LISTEN_CHECK_SECONDS = 15.0
REMIGRATE_SECONDS = 3600.0  # away for longer: others may have dropped our functions as unused
# Rolled back as a whole: safe to run again.
UNDONE = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)
MAX_ATTEMPTS = 6  # of what was undone
UNDONE_SECONDS = 0.02  # before the next, more with each
MAX_READ_ATTEMPTS = 4  # of a read whose connection is lost
MAX_IDLE = 8  # connections at hand between calls, outside the pool


class CannotCommit(PenstockError):
    """The server answers and does not commit."""


class Checkout:
    """A connection for the time of an `async with`; a class, since every call goes through it."""

    __slots__ = ("_connection", "_database", "_proxy")

    def __init__(self, database: "Database") -> None:
        self._database = database

    async def __aenter__(self) -> Any:
        self._proxy = await self._database.check_out()
        self._connection = self._proxy._con
        return self._proxy

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        await self._database.check_in(self._proxy, self._connection, error)


class Database:
    """A pool on the configured PostgreSQL, or on the embedded one when none is configured."""

    def __init__(
        self, settings: schema.Database, private_directory: Path, metrics: Metrics, sql: SchemaFiles
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
        self.healthy = False
        self.identity: int | None = None  # which database it is; None: it was never reached
        # why the database is down; while it is up, what is wrong with its other hosts
        self.problem = ""
        self._connector = Connector(settings, self.url, sql.search_path(settings.db_schema))
        self._pool: asyncpg.Pool | None = None
        self._browsing = BrowsePool(settings, self._connector.connect)
        self._standby = (
            Standby(settings, sql.search_path(settings.db_schema), lambda: self._connector.server)
            if settings.read_url
            else None
        )
        self._migrated: Server | None = None  # the server whose schema was brought up to date
        self._callbacks: list[Callable[[bool], None]] = []
        self._idle: list[Any] = []  # connections of calls that have just ended, for the next ones
        self._queueing = 0  # calls that wait for the pool: they come before `_idle`
        self._in_flight: dict[asyncpg.Connection, float] = {}  # since when
        self._active = asyncio.Event()  # there may be calls in flight or connections at hand
        self._listeners: dict[str, Callable[[str | None], None]] = {}  # by channel
        self._listen_again = asyncio.Event()  # a channel is new, or the connection is lost
        self._probing: asyncio.Task[bool] | None = None
        self._recovered = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._down_since: float | None = None
        metrics.gauge(
            "penstock_database_up",
            "1 while PostgreSQL answers",
            read=lambda: int(self.healthy),
            merge="max",
        )
        metrics.gauge(
            "penstock_database_pool_size",
            "Open connections in the broker's pool",
            read=lambda: self.pool_size,
        )
        metrics.gauge(
            "penstock_database_in_flight",
            "SQL calls of this broker in flight",
            read=lambda: len(self._in_flight),
        )
        metrics.gauge(
            "penstock_database_warnings",
            "1 while a second configured host also accepts writes, or belongs to another cluster",
            read=lambda: int(self.healthy and bool(self.problem)),
            merge="max",
        )
        self._outages = metrics.counter(
            "penstock_database_outages_total", "Times that PostgreSQL became unavailable"
        )

    @property
    def pool_size(self) -> int:
        return self._pool.get_size() if self._pool else 0

    @property
    def host(self) -> str:
        """The host in use; empty while the database is down."""
        server = self._connector.server
        return server.host.name if server and self.healthy else ""

    @property
    def pool_idle(self) -> int:
        return self._pool.get_idle_size() + len(self._idle) if self._pool else 0

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
        self._pool = await asyncpg.create_pool(
            min_size=0,
            max_size=self.settings.pool_size,
            max_inactive_connection_lifetime=IDLE_SECONDS,
            reset=keep_session,
            connect=self._connector.connect,
        )
        await self._browsing.start()
        if self._standby:
            await self._standby.start()
        if not await self._probe():
            if self._connector.pooled:
                raise ConfigError(f"this database cannot be used: {self.problem}")
            log.warning("PostgreSQL cannot be used; starting without it: %s", self.problem)
            self._went_down()
        self._spawn(self._watch())
        if len(self._connector.hosts) > 1:
            self._spawn(self._survey())

    async def stop(self) -> None:
        for task in (*self._tasks, *([self._probing] if self._probing else [])):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._browsing.stop()
        if self._standby:
            await self._standby.stop()
        if self._pool:
            await self._release_idle()
            try:
                await asyncio.wait_for(self._pool.close(), timeout=5)
            except (*GONE, asyncio.CancelledError):
                self._pool.terminate()
        self._connector.close()
        if self.embedded:
            await asyncio.to_thread(self.embedded.stop)
        self.healthy = False

    def on_change(self, callback: Callable[[bool], None]) -> None:
        """Call `callback(healthy)` each time the database goes down or comes back."""
        self._callbacks.append(callback)

    async def recovered(self) -> None:
        """Return when the database is up; at once if it is."""
        await self._recovered.wait()

    async def fetch(self, sql: str, *args: Any) -> list[asyncpg.Record]:
        """Run one statement; again when it lost a deadlock, for then nothing of it was done."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                async with self.connection() as connection:
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
        for attempt in range(MAX_ATTEMPTS):
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
        for attempt in range(MAX_READ_ATTEMPTS):
            try:
                return await self.fetch(sql, *args)
            except ConnectionLost:
                if attempt == MAX_READ_ATTEMPTS - 1:
                    raise
            except asyncpg.DataError as error:
                raise _unusable(error) from error
        raise AssertionError("unreachable")

    async def browse_standby(
        self, sql: str, *args: Any
    ) -> tuple[list[asyncpg.Record], float | None]:
        """`browse` on the standby of `database.read_url`: the rows, and how many seconds old they
        may be. None: they are the primary's.
        """
        if self._standby is not None:
            try:
                rows = await self._standby.fetch(sql, *args)
            except asyncpg.DataError as error:
                raise _unusable(error) from error
            if rows is not None:
                return rows
        return await self.browse(sql, *args), None

    async def browse(self, sql: str, *args: Any) -> list[asyncpg.Record]:
        """`read` for those who look (listings, status, analytics), on connections of their own.

        However slow that is and however many do it, the connections of pushes and pops stay free.
        """
        for attempt in range(MAX_READ_ATTEMPTS):
            if not self.healthy:
                break
            try:
                return await self._browsing.fetch(sql, *args)
            except asyncpg.DataError as error:
                raise _unusable(error) from error
            except GONE as error:
                lost = await self._suspect(error)
                if attempt == MAX_READ_ATTEMPTS - 1 or not isinstance(lost, ConnectionLost):
                    raise lost from error
        raise Unavailable("the database is down")

    def connection(self) -> "Checkout":
        """An asyncpg connection from the pool, for an `async with`. Session state must not be
        changed on it (SET LOCAL is fine).
        """
        return Checkout(self)

    async def check_out(self) -> Any:
        if not self.healthy or self._pool is None:
            raise Unavailable("the database is down")
        proxy = await self._acquire() if self._queueing or not self._idle else self._idle.pop()
        while proxy._con is None or proxy._con.is_closed():  # lost while it was idle
            await self._release(proxy)
            proxy = await self._acquire()
        self._in_flight[proxy._con] = time.monotonic()
        self._active.set()
        return proxy

    async def check_in(self, proxy: Any, connection: Any, error: BaseException | None) -> None:
        """Take a connection back, and say what an error on it means."""
        try:
            if isinstance(error, GONE):
                if not isinstance(error, asyncpg.InterfaceError) or connection.is_closed():
                    raise await self._suspect(error) from error
                # otherwise a wrong argument, not a lost connection
            elif isinstance(error, asyncpg.QueryCanceledError):
                raise Busy("the database took too long") from error
            elif isinstance(error, NO_ROOM):
                log.error("PostgreSQL: %s", error)
                raise Busy("the database cannot write") from error
        finally:
            self._in_flight.pop(connection, None)
            usable = error is None and self.healthy and not self._queueing
            if usable and len(self._idle) < MAX_IDLE:
                # handing it to the pool and back costs more than a small call
                self._idle.append(proxy)
            else:
                await self._release(proxy)

    async def listen(self, channel: str, callback: Callable[[str | None], None]) -> None:
        """Call back with each payload on `channel`, and with None after every (re)connect."""
        self._listeners[channel] = callback
        self._listen_again.set()
        if len(self._listeners) == 1:
            self._spawn(self._listen())

    async def drop_unused_functions(self) -> list[str]:
        """Drop the SQL functions of releases that no broker was seen of for long."""
        async with self.connection() as connection:
            return await drop_unused_functions(connection, self.settings.db_schema, self._sql)

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

    async def _release_idle(self) -> None:
        """The pool closes what is idle or old; it must see them for that."""
        idle, self._idle = self._idle, []
        for proxy in idle:
            await self._release(proxy)

    async def _release(self, proxy: Any) -> None:
        assert self._pool is not None
        try:
            await self._pool.release(proxy, timeout=self.settings.acquire_timeout)
        except GONE:
            pass  # the connection is lost either way; the pool opens another when it needs one

    async def _suspect(self, error: BaseException) -> Unavailable:
        if not self.healthy:
            # decided already: this call was cut off, and asking again would take its time
            return Unavailable("the database is down")
        if await self.probe():
            return ConnectionLost(f"a database connection was lost ({type(error).__name__})")
        self._went_down()
        return Unavailable("the database is down")

    async def _probe(self) -> bool:
        """Ask all hosts, choose one and commit there; whether it is in use and ready for calls."""
        choice = choose(await self._connector.survey(), self._connector.server)
        if choice.server is None:
            self._report(choice.reason)
            return False
        if self.healthy and choice.server != self._connector.server:
            self._report(f"{choice.server} took over from {self._connector.server}")
            return False  # what is open has to be cut off first; the next probe finds us down
        try:
            connection = await self._connector.dial(choice.server.host)
        except (*UNREACHABLE, asyncpg.PostgresError) as error:
            self._report(f"{choice.server.host.name}: {explain(error)}")
            return False
        try:
            await self._prepare(connection, choice.server)
        except (*GONE, CannotCommit) as error:
            self._report(f"{choice.server.host.name}: {explain(error)}")
            return False
        finally:
            connection.terminate()
        if not self.healthy:
            self._connector.use(choice.server)
        self._report(choice.warning)
        self._came_up()
        return True

    async def _prepare(self, connection: Any, server: Server) -> None:
        limit = self.settings.acquire_timeout
        try:
            await connection.execute(COMMIT, timeout=limit)
        except TimeoutError:
            # asyncpg asks the server to end the wait, which it only does for a session that is
            # closed in peace. Left behind, the session of every probe would wait there, until the
            # server has no room for more.
            try:
                await connection.close(timeout=limit)
            except UNREACHABLE:
                pass  # it is cut off by the caller
            raise CannotCommit(
                f"answers, but a commit takes longer than {limit:g} s "
                "(does its synchronous standby answer?)"
            ) from None
        except GONE:
            raise
        except asyncpg.PostgresError as error:
            raise CannotCommit(f"answers, but cannot commit: {error}") from error
        away = time.monotonic() - self._down_since if self._down_since is not None else 0.0
        if server != self._migrated or away > REMIGRATE_SECONDS:
            self.identity = await migrate(connection, self.settings.db_schema, self._sql)
            self._migrated = server

    def _report(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.error("PostgreSQL: %s", problem)
        self.problem = problem

    def _came_up(self) -> None:
        if self.healthy:
            return
        self.healthy = True
        self._recovered.set()
        if self._down_since is not None:
            log.info(
                "PostgreSQL recovery detected after %.1f s", time.monotonic() - self._down_since
            )
            self._down_since = None
        for callback in self._callbacks:
            callback(True)

    def _went_down(self) -> None:
        if self._down_since is not None:
            return
        self.healthy = False
        self._recovered.clear()
        self._down_since = time.monotonic()
        self._outages.add()
        log.warning(
            "Database connection failed: PostgreSQL is down; %d calls in flight",
            len(self._in_flight),
        )
        self._connector.cut()
        for callback in self._callbacks:
            callback(False)
        self._spawn(self._wait_for_recovery())

    async def _wait_for_recovery(self) -> None:
        for seconds in chain(PROBE_SECONDS, repeat(PROBE_SECONDS[-1])):
            if self.healthy:
                return
            await asyncio.sleep(seconds)
            if self.embedded and self.embedded.pid() is None:
                log.warning("the embedded PostgreSQL is gone; starting it again")
                try:
                    await asyncio.to_thread(self.embedded.start)
                except PenstockError as error:
                    log.error("%s", error)
            try:
                await self.probe()
            except (PenstockError, asyncpg.PostgresError) as error:
                self._report(f"the database answers but its schema cannot be prepared: {error}")

    async def _watch(self) -> None:
        """Find the server that is frozen or does not commit: a call in flight does not finish."""
        next_probe = 0.0
        while True:
            await self._active.wait()
            await asyncio.sleep(WATCH_SECONDS)
            await self._release_idle()
            if not self._in_flight and not self._idle:
                self._active.clear()
                continue
            now = time.monotonic()
            oldest = min(self._in_flight.values(), default=now)
            # Half, so that a push waits for little more than one limit until it is buffered.
            if (
                self.healthy
                and now - oldest > self.settings.acquire_timeout / 2
                and now >= next_probe
            ):
                # a long statement is no reason to commit all the time
                next_probe = now + self.settings.acquire_timeout
                if not await self.probe():
                    self._went_down()

    async def _survey(self) -> None:
        """Notice that another host was promoted, or that ours takes no writes."""
        while True:
            await asyncio.sleep(SURVEY_SECONDS)
            if not self.healthy:
                continue
            choice = choose(await self._connector.survey(), self._connector.server)
            if not self.healthy:
                continue
            if choice.server == self._connector.server:
                self._report(choice.warning)
            elif choice.server:  # not one more statement on the old one
                self._report(f"{choice.server} took over from {self._connector.server}")
                self._went_down()
            elif not await self.probe():
                self._went_down()

    async def _listen(self) -> None:
        """All channels share a connection."""
        while True:
            await self._recovered.wait()
            try:
                connection = await self._connector.connect()
            except (*UNREACHABLE, asyncpg.PostgresError):
                await asyncio.sleep(PROBE_SECONDS[-1])
                continue
            connection.add_termination_listener(lambda _: self._listen_again.set())
            heard: set[str] = set()
            try:
                while not connection.is_closed():
                    self._listen_again.clear()
                    for channel in self._listeners.keys() - heard:
                        heard.add(channel)
                        callback = self._listeners[channel]
                        await connection.add_listener(channel, _payload_to(callback))
                        callback(None)
                    try:
                        await asyncio.wait_for(self._listen_again.wait(), LISTEN_CHECK_SECONDS)
                    except TimeoutError:  # silent for long: is the other end still there?
                        await connection.execute("SELECT 1", timeout=self.settings.acquire_timeout)
            except (*GONE, asyncpg.PostgresError):
                pass  # the loop connects again and says so by calling back with None
            finally:
                connection.terminate()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _payload_to(callback: Callable[[str | None], None]) -> Callable[..., None]:
    return lambda *event: callback(event[3])


def _unusable(error: asyncpg.DataError) -> InvalidRequest:
    log.info("the database refused a value: %s", error)
    return InvalidRequest("a value of this request cannot be stored or looked for")
