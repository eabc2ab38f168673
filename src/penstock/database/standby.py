"""Read from a standby (`database.read_url`), to take load off the primary.

Only views for people read from it, never anything that leases, counts or decides. Answers include
the lag of the standby. If it is unavailable or belongs to another cluster, the primary is read, and
the standby is tried again after `UNUSABLE_SECONDS`.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import asyncpg

from penstock.config import schema
from penstock.database.browse import BrowsePool
from penstock.database.connector import Connector, WrongServer
from penstock.database.hosts import DatabaseServer
from penstock.protocol.replication import STANDBY_LAG

log = logging.getLogger("penstock.database")

UNUSABLE_SECONDS = 10.0  # until an unusable standby is tried again
LAG_SECONDS = 1.0  # until the lag is measured again
FAILURES = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)


class Standby(BrowsePool):
    """A pool on the standby. `primary` returns the server that the broker writes to."""

    def __init__(
        self,
        settings: schema.DatabaseSettings,
        search_path: str,
        primary: Callable[[], DatabaseServer | None],
    ) -> None:
        super().__init__(settings, self._dial)
        self._primary = primary
        self._connector = Connector(settings, settings.read_url, search_path)
        self._retry_at = 0.0
        self._lag = 0.0  # seconds
        self._measured_at = -LAG_SECONDS

    async def read(self, sql: str, *args: Any) -> tuple[list[Any], float] | None:
        """Return rows and their maximum age in seconds; None if the standby cannot be used."""
        if time.monotonic() < self._retry_at:
            return None
        try:
            if time.monotonic() - self._measured_at >= LAG_SECONDS:
                self._lag = (await self.fetch(STANDBY_LAG))[0][0]
                self._measured_at = time.monotonic()
            return await self.fetch(sql, *args), self._lag
        except FAILURES as error:
            self._retry_at = time.monotonic() + UNUSABLE_SECONDS
            log.warning(
                "the standby of database.read_url cannot be used, the primary is read instead: %s",
                str(error) or type(error).__name__,
            )
            return None

    async def _dial(self, statement_timeout: float) -> Any:
        """Connect to the first host that belongs to the primary's cluster."""
        primary = self._primary()
        problem: BaseException = WrongServer("the primary is not known")
        for host in self._connector.hosts:
            try:
                connection = await self._connector.dial(host, statement_timeout)
                try:
                    server = await self._connector.identify(connection, host)
                    if primary is not None and server.system == primary.system:
                        return connection
                    raise WrongServer(f"{host.name} is not a standby of {primary}")
                except BaseException:
                    connection.terminate()
                    raise
            except FAILURES as error:
                problem = error
        raise problem
