"""Sample PostgreSQL: the time of a commit, the oldest transaction and its owner, dead rows, WAL,
messages per commit, connections.
"""

import time

import msgspec

from penstock.database import Database
from penstock.database.health import COMMIT
from penstock.monitor.inspection import sql

FIGURES = sql("database_figures")


class Holder(msgspec.Struct):
    """The owner and the age of the oldest open transaction."""

    seconds: float
    who: str


class DatabaseCard(msgspec.Struct, rename="camel"):
    up: bool
    commit_seconds: float | None = None
    oldest_transaction: Holder | None = None
    dead_rows: int | None = None
    wal_per_second: float | None = None
    messages_per_commit: float | None = None  # pushed and completed; None without any
    connections: int | None = None
    max_connections: int | None = None


DOWN = DatabaseCard(up=False)


class DatabaseWatch:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._before: tuple[float, int, int, int] | None = None  # when, WAL, commits, messages

    async def sample(self, messages: int) -> DatabaseCard:
        """Sample the database. `messages` counts those pushed and completed, ever."""
        (row,) = await self._database.browse(FIGURES)
        began = time.perf_counter()
        await self._database.fetch(COMMIT)
        card = DatabaseCard(
            up=True,
            commit_seconds=time.perf_counter() - began,
            dead_rows=row["dead_rows"],
            connections=row["connections"],
            max_connections=row["max_connections"],
        )
        if row["oldest_seconds"] is not None:
            who = f"{row['oldest_who']}, pid {row['oldest_pid']}"
            card.oldest_transaction = Holder(row["oldest_seconds"], who)
        now = (time.monotonic(), row["wal"], row["commits"], messages)
        if self._before is not None:
            seconds, wal, commits, moved = (
                new - old for new, old in zip(now, self._before, strict=True)
            )
            card.wal_per_second = wal / seconds
            if commits > 0 and moved > 0:
                card.messages_per_commit = moved / commits
        self._before = now
        return card
