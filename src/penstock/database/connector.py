"""Opens every connection of a broker, all of them to one server.

`survey` asks all hosts who they are; `use` decides for one of them; from then on `connect` opens
connections to that server only and refuses another one that answers at its address. `cut` drops all
that were opened. Where several hosts are configured, the connection that a survey asks a host on is
kept for the next survey: a survey every second must not cost a backend process each.
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
FROZEN_SECONDS = 10  # a transaction in which a broker does nothing for so long is rolled back
GRACE_SECONDS = 0.25  # what other hosts get to answer once one that takes writes has answered


class WrongServer(ConnectionError):
    """The server that answers is not the one that the broker works on."""


class Connector:
    """Where connections come from. Everything here may raise what `UNREACHABLE` lists."""

    def __init__(self, settings: schema.DatabaseSettings, url: str, search_path: str) -> None:
        self._settings = settings
        self._url = url
        self._search_path = search_path
        self.hosts = hosts_of(url)
        self.server: DatabaseServer | None = None  # every connection in `_open` is on this one
        self.pooled = False  # a host turned out to be a connection pooler
        self._open: set[asyncpg.Connection] = set()
        self._surveying: dict[Host, asyncpg.Connection] = {}  # for surveys

    async def connect(
        self, _: None = None, *, statement_timeout: float | None = None, **driver: Any
    ) -> Any:
        """A connection to the server in use. `statement_timeout` instead of the configured one is
        for those who look (browse.py).

        asyncpg's pool calls it with a URL, which is None here, and with options of the driver.
        """
        server = self.server
        if server is None:
            raise WrongServer("no database server is in use")
        connection = await self.dial(server.host, statement_timeout, **driver)
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

    async def dial(self, host: Host, statement_timeout: float | None = None, **driver: Any) -> Any:
        """A connection to this host, whoever it is."""
        options: dict[str, Any] = {"host": host.host} if host.host else {}
        if host.port:
            options["port"] = host.port
        return await asyncpg.connect(
            self._url,
            timeout=self._settings.acquire_timeout,
            target_session_attrs="any",  # we ask ourselves
            server_settings=self._session_settings(statement_timeout),
            **options,
            **driver,
        )

    async def survey(self) -> list[Sighting]:
        """Ask all hosts at once, in the order of the URL.

        Over when all have answered or failed; a little after the first that takes writes, the
        others are left out.
        """
        loop = asyncio.get_running_loop()
        asked = [asyncio.create_task(self._look(host)) for host in self.hosts]
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
        """Work on this one from now on. What is open on another must have been cut before."""
        self.server = server

    def cut(self) -> None:
        """Drop every connection without a word to the server, which may hang."""
        for connection in list(self._open):
            connection.terminate()

    def close(self) -> None:
        self.cut()
        for connection in self._surveying.values():
            connection.terminate()
        self._surveying.clear()

    async def _look(self, host: Host) -> Sighting:
        limit = self._settings.acquire_timeout
        try:
            async with asyncio.timeout(limit):
                return Sighting(host, await self._identify(host))
        except TimeoutError:
            return Sighting(host, None, f"does not answer within {limit:g} s")
        except (*REFUSED, OSError) as error:
            self.pooled = self.pooled or is_pooler(error)
            return Sighting(host, None, explain(error))

    async def _identify(self, host: Host) -> DatabaseServer:
        kept = self._surveying.pop(host, None)
        if kept is not None and not kept.is_closed():
            try:
                return await self._ask(host, kept)
            except (*REFUSED, ConnectionError):
                pass  # the server may have been restarted: ask again
        return await self._ask(host, await self.dial(host))

    async def _ask(self, host: Host, connection: Any) -> DatabaseServer:
        """Who it is; the connection is kept for the next survey where there are several hosts."""
        try:
            server = await self.identify(connection, host)
        except BaseException:
            connection.terminate()
            raise
        if len(self.hosts) > 1 and host not in self._surveying:
            self._surveying[host] = connection
        else:  # another survey at the same time was first
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
            # A broker that is frozen keeps its connections: what it has locked is free again then.
            "idle_in_transaction_session_timeout": str(FROZEN_SECONDS * 1000),
            "tcp_user_timeout": str(FROZEN_SECONDS * 1000),  # while it takes no answer
        }
        limit = self._settings.statement_timeout if statement_timeout is None else statement_timeout
        if limit:
            settings["statement_timeout"] = str(int(limit * 1000))
        if statement_timeout is not None:
            # Listings have optional filters and lists of ids. A plan that does not know them is
            # some hundred times slower with 30,000 queues; planning takes a millisecond.
            settings["plan_cache_mode"] = "force_custom_plan"
        return settings
