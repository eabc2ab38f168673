"""Receive NOTIFY of other sessions, for all channels on one dedicated connection."""

import asyncio
from collections.abc import Callable

import asyncpg

from penstock.config import schema
from penstock.database.connector import Connector
from penstock.database.health import GONE, PROBE_SECONDS, UNREACHABLE, DatabaseHealth
from penstock.io.tasks import supervised
from penstock.metrics import Metrics

LISTEN_CHECK_SECONDS = 15.0


class Notifications:
    def __init__(
        self,
        settings: schema.DatabaseSettings,
        connector: Connector,
        health: DatabaseHealth,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._connector = connector
        self._health = health
        self._metrics = metrics
        self._listeners: dict[str, Callable[[str | None], None]] = {}  # by channel
        self._listen_again = asyncio.Event()  # there is a new channel, or the connection is lost
        self._task: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def listen(self, channel: str, callback: Callable[[str | None], None]) -> None:
        """Call `callback` with each payload on `channel`, and with None after every (re)connect."""
        self._listeners[channel] = callback
        self._listen_again.set()
        if self._task is None:
            self._task = supervised("database notifications", self._listen, self._metrics)

    async def _listen(self) -> None:
        while True:
            await self._health.recovered()
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
                        async with asyncio.timeout(LISTEN_CHECK_SECONDS):
                            await self._listen_again.wait()
                    except TimeoutError:  # check that the connection is still alive
                        await connection.execute("SELECT 1", timeout=self._settings.acquire_timeout)
            except (*GONE, asyncpg.PostgresError):
                pass  # connect again; callbacks then get None
            finally:
                connection.terminate()


def _payload_to(callback: Callable[[str | None], None]) -> Callable[..., None]:
    return lambda *event: callback(event[3])
