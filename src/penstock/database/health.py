"""Decide whether PostgreSQL is up, in one place for the whole broker.

- A connection error, or an acquire that takes too long, makes the server *suspect*. One probe,
  shared by all concurrent callers, decides. If it succeeds, only that connection was lost (somebody
  ran `pg_terminate_backend`). If it fails, the database is down.
- A probe identifies all hosts of the URL, chooses one (see `hosts`) and *commits* there. A server
  that answers but cannot commit, because its synchronous standby hangs, is useless for queues.
- A frozen server closes no connections, and a commit that hangs looks like any other call. If a
  call is in flight for longer than half of `acquire_timeout`, a watchdog probes. If the probe
  fails, all calls are cut off.
- A server that refuses writes (a standby, `default_transaction_read_only`) counts as down. A server
  whose disk is full still counts as up; its calls fail with `Busy`.
- While the database is down, calls fail immediately with `Unavailable`, and one task probes with
  growing pauses (0.1 s to 1 s). The first successful probe migrates the schema if necessary, and
  calls the callbacks.
- All connections are to one server (see `connector`). If several hosts are configured, they are
  surveyed every second. When another host has been promoted, all calls are cut off as if the
  database had gone down, and new connections go to that host.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from itertools import chain, repeat
from typing import Any

import asyncpg

from penstock.config import schema
from penstock.database.connector import Connector
from penstock.database.embedded import EmbeddedPostgres
from penstock.database.failure import explain
from penstock.database.hosts import DatabaseServer, choose
from penstock.database.migrate import SchemaFiles, migrate
from penstock.errors import ConfigError, ConnectionLost, PenstockError, Unavailable
from penstock.io.tasks import supervised
from penstock.metrics import Metrics

log = logging.getLogger("penstock.database")

GONE = (  # errors of a call whose connection or server is lost
    ConnectionError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,  # the connection was closed before the call
    asyncpg.InternalClientError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.ReadOnlySQLTransactionError,  # the server became a standby
)
UNREACHABLE = (*GONE, OSError)  # errors of opening a connection: no socket, route or host as well
PROBE_SECONDS = (0.1, 0.2, 0.4, 0.7, 1.0)
SURVEY_SECONDS = 1.0
# This writes only WAL and no table. Its commit waits for standbys like any other commit.
COMMIT = "SELECT pg_logical_emit_message(true, 'penstock', 'probe')"
REMIGRATE_SECONDS = 3600.0  # after a longer outage, our functions may have been dropped as unused


class CannotCommit(PenstockError):
    """The server answers but cannot commit."""


class DatabaseHealth:
    """The state of the database. `in_flight` returns the number of calls in flight."""

    def __init__(
        self,
        settings: schema.DatabaseSettings,
        connector: Connector,
        embedded: EmbeddedPostgres | None,
        sql: SchemaFiles,
        metrics: Metrics,
        in_flight: Callable[[], int],
    ) -> None:
        self.up = False
        self.identity: int | None = None  # number of the database; None: it was never reached
        # why the database is down or, while it is up, what is wrong with other hosts
        self.problem = ""
        self._settings = settings
        self._connector = connector
        self._embedded = embedded
        self._sql = sql
        self._in_flight = in_flight
        self._metrics = metrics
        self._migrated: DatabaseServer | None = None  # the server whose schema is up to date
        self._callbacks: list[Callable[[bool], None]] = []
        self._probing: asyncio.Task[bool] | None = None
        self._recovered = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._down_since: float | None = None
        metrics.gauge(
            "penstock_database_up",
            "1 while PostgreSQL answers",
            read=lambda: int(self.up),
            merge="max",
        )
        metrics.gauge(
            "penstock_database_warnings",
            "1 while a second configured host also accepts writes, or belongs to another cluster",
            read=lambda: int(self.up and bool(self.problem)),
            merge="max",
        )
        self._outages = metrics.counter(
            "penstock_database_outages_total", "Times that PostgreSQL became unavailable"
        )

    async def start(self) -> None:
        """Probe the servers for the first time. All of them may be down."""
        if not await self._probe():
            if self._connector.pooled:
                raise ConfigError(f"this database cannot be used: {self.problem}")
            log.warning("PostgreSQL cannot be used; starting without it: %s", self.problem)
            self.went_down()
        if len(self._connector.hosts) > 1:
            self._spawn("database survey", self._survey)

    async def stop(self) -> None:
        for task in (*self._tasks, *([self._probing] if self._probing else [])):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def on_change(self, callback: Callable[[bool], None]) -> None:
        """Call `callback(healthy)` each time the database goes down or comes back."""
        self._callbacks.append(callback)

    async def recovered(self) -> None:
        """Wait until the database is up."""
        await self._recovered.wait()

    async def probe(self) -> bool:
        """Return whether the server can be used. Concurrent callers share one probe."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        return await asyncio.shield(self._probing)

    async def suspect(self, error: BaseException) -> Unavailable:
        """Probe the server after a connection error. Return the error to raise."""
        if not self.up:  # decided already: this call was cut off
            return Unavailable("the database is down")
        if await self.probe():
            return ConnectionLost(f"a database connection was lost ({type(error).__name__})")
        self.went_down()
        return Unavailable("the database is down")

    async def _probe(self) -> bool:
        """Survey all hosts, choose one and commit there. Return whether it is ready for calls."""
        choice = choose(await self._connector.survey(), self._connector.server)
        if choice.server is None:
            self._report(choice.reason)
            return False
        if self.up and choice.server != self._connector.server:
            self._report(f"{choice.server} took over from {self._connector.server}")
            return False  # open calls must be cut off first; a later probe chooses the new server
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
        if not self.up:
            self._connector.use(choice.server)
        self._report(choice.warning)
        self._came_up()
        return True

    async def _prepare(self, connection: Any, server: DatabaseServer) -> None:
        limit = self._settings.acquire_timeout
        try:
            await connection.execute(COMMIT, timeout=limit)
        except TimeoutError:
            # Close the session regularly, so that asyncpg cancels the commit on the server.
            # Otherwise the session of each probe would keep waiting there, until the server
            # reaches its limit of connections.
            try:
                await connection.close(timeout=limit)
            except UNREACHABLE:
                pass  # the caller terminates it
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
            self.identity = await migrate(connection, self._settings.db_schema, self._sql)
            self._migrated = server

    def _report(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.error("PostgreSQL: %s", problem)
        self.problem = problem

    def _came_up(self) -> None:
        if self.up:
            return
        self.up = True
        self._recovered.set()
        if self._down_since is not None:
            log.info(
                "PostgreSQL recovery detected after %.1f s", time.monotonic() - self._down_since
            )
            self._down_since = None
        for callback in self._callbacks:
            callback(True)

    def went_down(self) -> None:
        """Cut off all calls, and start to wait for a usable server."""
        if self._down_since is not None:
            return
        self.up = False
        self._recovered.clear()
        self._down_since = time.monotonic()
        self._outages.add()
        log.warning(
            "Database connection failed: PostgreSQL is down; %d calls in flight",
            self._in_flight(),
        )
        self._connector.cut()
        for callback in self._callbacks:
            callback(False)
        self._spawn("database recovery", self._wait_for_recovery)

    async def _wait_for_recovery(self) -> None:
        for seconds in chain(PROBE_SECONDS, repeat(PROBE_SECONDS[-1])):
            if self.up:
                return
            await asyncio.sleep(seconds)
            if self._embedded and self._embedded.pid() is None:
                log.warning("the embedded PostgreSQL has stopped; starting it again")
                try:
                    await asyncio.to_thread(self._embedded.start)
                except PenstockError as error:
                    log.error("%s", error)
            try:
                await self.probe()
            except (PenstockError, asyncpg.PostgresError) as error:
                self._report(f"the database answers but its schema cannot be prepared: {error}")

    async def _survey(self) -> None:
        """Detect that another host was promoted, or that the server in use refuses writes."""
        while True:
            await asyncio.sleep(SURVEY_SECONDS)
            if not self.up:
                continue
            choice = choose(await self._connector.survey(), self._connector.server)
            if not self.up:
                continue
            if choice.server == self._connector.server:
                self._report(choice.warning)
            elif choice.server:  # run no more statements on the old server
                self._report(f"{choice.server} took over from {self._connector.server}")
                self.went_down()
            elif not await self.probe():
                self.went_down()

    def _spawn(self, name: str, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = supervised(name, loop, self._metrics)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
