"""Open all connections of a broker, all of them to one server.

`survey` identifies the server on each host, and `use` chooses one. From then on, `connect` opens
connections to that server only, and refuses another server at the same address. `cut` drops all
open connections. If several hosts are configured, a survey keeps its connection to each host for
the next survey. Otherwise a survey every second would start a backend process per host.
"""

import asyncio
import logging
from typing import Any

import asyncpg

from penstock.config import schema
from penstock.database.failure import explain, is_pooler
from penstock.database.hosts import DatabaseServer, Host, Sighting, hosts_of, identify

log = logging.getLogger("penstock.database")

REFUSED = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
FROZEN_SECONDS = 10  # PostgreSQL rolls back a transaction that is idle for so long
GRACE_SECONDS = 0.25  # time for other hosts to answer after the first writable one


class WrongServer(ConnectionError):
    """The server that answers is not the one that the broker uses."""


class Connector:
    """The source of connections. All methods may raise the errors in `UNREACHABLE`."""

    def __init__(self, settings: schema.DatabaseSettings, url: str, search_path: str) -> None:
        self._settings = settings
        self._url = url
        self._search_path = search_path
        self.hosts = hosts_of(url)
        self.server: DatabaseServer | None = None  # every connection in `_open` is on this one
        self.pooled = False  # a host is a connection pooler
        self._open: set[asyncpg.Connection] = set()
        self._survey_connections: dict[Host, asyncpg.Connection] = {}

    async def connect(self, statement_timeout: float | None = None) -> Any:
        """Connect to the server in use. `statement_timeout` overrides the configured one."""
        server = self.server
        if server is None:
            raise WrongServer("no database server is in use")
        connection = await self.dial(server.host, statement_timeout)
        try:
            answering = await self.identify(connection, server.host)
            if answering != server or self.server != server:
                raise WrongServer(f"{answering} answers instead of {server}")
        except BaseException:
            connection.terminate()
            raise
        self._open.add(connection)
        connection.add_termination_listener(lambda _: self._open.discard(connection))
        return connection

    async def dial(self, host: Host, statement_timeout: float | None = None) -> Any:
        """Connect to this host, whichever server it is."""
        options: dict[str, Any] = {"host": host.host} if host.host else {}
        if host.port:
            options["port"] = host.port
        return await asyncpg.connect(
            self._url,
            timeout=self._settings.acquire_timeout,
            target_session_attrs="any",  # `identify` checks it
            server_settings=self._session_settings(statement_timeout),
            **options,
        )

    async def survey(self) -> list[Sighting]:
        """Ask all hosts concurrently. Return the results in the order of the URL.

        Ends when all have answered or failed, or `GRACE_SECONDS` after the first writable server
        has answered.
        """
        loop = asyncio.get_running_loop()
        asked = [asyncio.create_task(self._survey_host(host)) for host in self.hosts]
        waiting: set[asyncio.Task[Sighting]] = set(asked)
        deadline: float | None = None
        try:
            while waiting:
                timeout = None if deadline is None else max(0.0, deadline - loop.time())
                done, waiting = await asyncio.wait(
                    waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                servers = [task.result().server for task in done]
                if deadline is None and any(server and server.writable for server in servers):
                    deadline = loop.time() + GRACE_SECONDS
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return [
            task.result() if task not in waiting else Sighting(host, None, "does not answer")
            for host, task in zip(self.hosts, asked, strict=True)
        ]

    def use(self, server: DatabaseServer) -> None:
        """Use this server from now on. Connections to another one must have been cut before."""
        self.server = server

    def cut(self) -> None:
        """Drop all connections without notifying the server, which may hang."""
        for connection in list(self._open):
            connection.terminate()

    def close(self) -> None:
        self.cut()
        for connection in self._survey_connections.values():
            connection.terminate()
        self._survey_connections.clear()

    async def _survey_host(self, host: Host) -> Sighting:
        limit = self._settings.acquire_timeout
        try:
            async with asyncio.timeout(limit):
                return Sighting(host, await self._identify_host(host))
        except TimeoutError:
            return Sighting(host, None, f"does not answer within {limit:g} s")
        except (*REFUSED, OSError) as error:
            self.pooled = self.pooled or is_pooler(error)
            return Sighting(host, None, explain(error))

    async def _identify_host(self, host: Host) -> DatabaseServer:
        kept = self._survey_connections.pop(host, None)
        if kept is not None and not kept.is_closed():
            try:
                return await self._identify_on(kept, host)
            except (*REFUSED, ConnectionError):
                pass  # the server may have been restarted: connect again
        return await self._identify_on(await self.dial(host), host)

    async def _identify_on(self, connection: Any, host: Host) -> DatabaseServer:
        """Identify the server. With several hosts, keep the connection for the next survey."""
        try:
            server = await self.identify(connection, host)
        except BaseException:
            connection.terminate()
            raise
        if len(self.hosts) > 1 and host not in self._survey_connections:
            self._survey_connections[host] = connection
        else:  # one host only, or a concurrent survey was faster
            connection.terminate()
        return server

    async def identify(self, connection: Any, host: Host) -> DatabaseServer:
        limit = self._settings.acquire_timeout
        return await identify(connection, host, limit, self._search_path)

    def _session_settings(self, statement_timeout: float | None) -> dict[str, str]:
        settings = {
            "search_path": self._search_path,
            "application_name": "penstock",
            "timezone": "UTC",
            "jit": "off",
            # A frozen broker keeps its connections. These settings release its locks.
            "idle_in_transaction_session_timeout": str(FROZEN_SECONDS * 1000),
            "tcp_user_timeout": str(FROZEN_SECONDS * 1000),  # if it does not read its answer
        }
        limit = self._settings.statement_timeout if statement_timeout is None else statement_timeout
        if limit:
            settings["statement_timeout"] = str(int(limit * 1000))
        if statement_timeout is not None:
            # Listings have optional filters and lists of ids. With 30,000 queues, a generic plan
            # is several hundred times slower; planning takes a millisecond.
            settings["plan_cache_mode"] = "force_custom_plan"
        return settings
