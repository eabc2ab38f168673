"""Who consumes: the connections that pop, by queue and group, of this process and of the others.

A consumer is a connection that asked for messages of a group and is still open; one that asked for
nothing in `MEMBER_SECONDS` is not counted any more (it may serve something else by now). Every
process writes its counts into its row of `members` (`Presence`), so any process can add up the
rows; its own counts are current.
"""

import time
from typing import Protocol

from penstock.database import Database
from penstock.queues.schema import query

MEMBER_SECONDS = 600.0
MAX_REPORTED = 1000  # pairs of queue and group that one row names
ALIVE_SECONDS = 20.0  # a process that said nothing for so long is gone

OTHERS = query("consumers")


class ConsumerConnection(Protocol):
    @property
    def closed(self) -> bool: ...


class ConsumerConnections:
    def __init__(self, database: Database) -> None:
        self._database = database
        self.member = ""  # this process in the table, when it is there
        self._seen: dict[
            tuple[str, str], dict[ConsumerConnection, float]
        ] = {}  # by queue and group

    def seen(self, queue: str | None, group: str, consumer: ConsumerConnection | None) -> None:
        """Record that a connection asked for messages."""
        if queue is not None and consumer is not None:
            self._seen.setdefault((queue, group), {})[consumer] = time.monotonic()

    def counts(self) -> dict[tuple[str, str], int]:
        """Count the consumers in this process by queue and group. Forget those that are gone."""
        oldest = time.monotonic() - MEMBER_SECONDS
        for key, consumers in tuple(self._seen.items()):
            for consumer, at in tuple(consumers.items()):
                if consumer.closed or at < oldest:
                    del consumers[consumer]
            if not consumers:
                del self._seen[key]
        return {key: len(consumers) for key, consumers in self._seen.items()}

    async def members(self) -> dict[tuple[str, str], int]:
        """Return the number of consumers in all processes, by queue and group."""
        counts = self.counts()
        for row in await self._database.browse(OTHERS, ALIVE_SECONDS, self.member):
            key = row["queue"], row["group_name"]
            counts[key] = counts.get(key, 0) + row["consumers"]
        return counts
