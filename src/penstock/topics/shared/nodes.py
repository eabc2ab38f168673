"""The live brokers as Kafka's clients see them: number, address, and who coordinates which group.

Every broker with a Kafka listener writes a heartbeat every `BEAT_SECONDS` and reads those of the
others. A broker without a heartbeat for `ALIVE_SECONDS` is left out. While the database is down,
the last list stays.

A group of Kafka clients has a coordinator: the broker that knows its members. A row names it. When
that broker is gone, another one becomes coordinator with the next epoch, and the members rejoin.
"""

import asyncio
import hashlib
import logging
from contextlib import suppress
from typing import NamedTuple

import asyncpg

from penstock.database import Database
from penstock.errors import Unavailable
from penstock.io.tasks import cancelled, supervised
from penstock.metrics import Metrics
from penstock.protocol.ids import uuid7

log = logging.getLogger("penstock.topics.shared")

BEAT_SECONDS = 1.0
ALIVE_SECONDS = 6.0
BEFORE_FIRST = 1  # the number of a broker that has not reached the database yet


class LiveNode(NamedTuple):
    node_id: int
    host: str
    port: int


class SharedNodes:
    def __init__(self, database: Database, metrics: Metrics) -> None:
        self._database = database
        self._metrics = metrics
        self._member = uuid7().hex
        self._address: tuple[str, int] | None = None
        self._task: asyncio.Task[None] | None = None
        self.own = BEFORE_FIRST
        self.others: list[LiveNode] = []

    async def start(self, host: str, port: int) -> None:
        """Announce this broker under this address."""
        self._address = host, port
        with suppress(Unavailable, asyncpg.PostgresError):  # the next heartbeat does
            await self._beat()
        self._task = supervised("Kafka nodes", self._keep_beating, self._metrics)

    async def stop(self) -> None:
        await cancelled(self._task)
        self._task = None
        with suppress(
            Unavailable, asyncpg.PostgresError
        ):  # the others notice the missing heartbeat
            await self._database.fetch(
                "UPDATE shared_nodes SET seen_at = '-infinity' WHERE member = $1", self._member
            )

    @property
    def alive(self) -> list[int]:
        return [self.own, *(node.node_id for node in self.others)]

    def suggest(self, key: str) -> int:
        """Return the live broker for this key. Few keys move when one leaves (rendezvous hash)."""
        return max(self.alive, key=lambda node: hashlib.blake2b(f"{node} {key}".encode()).digest())

    async def coordinator(self, group: str, suggested: int) -> tuple[int, int]:
        """Return the group's coordinator and epoch. If it is not alive, appoint `suggested`."""
        [row] = await self._database.read(
            "SELECT * FROM shared_coordinate($1, $2, $3)", group, suggested, self.alive
        )
        return row["node_id"], row["epoch"]

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            try:
                await self._beat()
            except Unavailable:
                pass  # the database logs its outages itself, once
            except asyncpg.PostgresError as error:
                log.warning("could not record that this broker is alive: %s", error)

    async def _beat(self) -> None:
        assert self._address is not None
        host, port = self._address
        rows = await self._database.fetch(
            "SELECT * FROM shared_node($1, $2, $3, $4)", self._member, host, port, ALIVE_SECONDS
        )
        self.own = next((row["node_id"] for row in rows if row["own"]), self.own)
        self.others = [
            LiveNode(row["node_id"], row["host"], row["port"]) for row in rows if not row["own"]
        ]
