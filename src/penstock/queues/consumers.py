"""Count the consumers of each queue and group: the connections that pop, in all processes.

A consumer is an open connection that has asked for messages of a group. One that has not asked for
`MEMBER_SECONDS` is no longer counted, since it may serve another purpose by then. Every
process writes its counts into its row of `members` (`Presence`), so any process can add up the
rows; its own counts are current.

The Python client also sends a report every few seconds for each of its consumers: who it is, what
it is processing, and its last error. A process keeps the reports that it received in memory, and
its row of `members` carries them to the others. So nothing is stored for a consumer that is gone.
"""

import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Protocol

from penstock.contract.consumers import MAX_REPORTS, ConsumerHealth
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


class ConsumerReports:
    """The reports that came to this process."""

    def __init__(self) -> None:
        # by id, the one that reported last at the end
        self._reports: dict[str, ConsumerHealth] = {}

    def add(self, reports: Iterable[ConsumerHealth]) -> None:
        now = datetime.now(UTC)
        for report in reports:
            self._reports.pop(report.id, None)
            if not report.ended:
                report.seen_at = now
                self._reports[report.id] = report
        while len(self._reports) > MAX_REPORTS:
            del self._reports[next(iter(self._reports))]

    def alive(self) -> list[ConsumerHealth]:
        """Return the reports of consumers that reported lately, and forget the others."""
        oldest = datetime.now(UTC) - timedelta(seconds=ALIVE_SECONDS)
        for report in tuple(self._reports.values()):
            if report.seen_at is None or report.seen_at < oldest:
                del self._reports[report.id]
        return list(self._reports.values())


def merged(reports: Iterable[ConsumerHealth]) -> list[ConsumerHealth]:
    """Return each consumer once, as it was last seen, by queue, group and name."""
    newest: dict[str, ConsumerHealth] = {}
    early = datetime.min.replace(tzinfo=UTC)
    for report in sorted(reports, key=lambda one: one.seen_at or early):
        newest[report.id] = report
    return sorted(newest.values(), key=lambda one: (one.queue, one.group, one.name, one.id))
