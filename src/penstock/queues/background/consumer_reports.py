"""Keep the reports of consumers: who they are, what they are processing, and their last error.

The Python client sends a report every few seconds for each of its consumers. A process keeps the
reports that it received in memory, and its row of `members` (`Presence`) carries them to the
others. So nothing is stored for a consumer that is gone. Of two reports, the newer one counts.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from penstock.contract.consumers import MAX_REPORTS, ConsumerHealth
from penstock.queues.consumers import ALIVE_SECONDS


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
