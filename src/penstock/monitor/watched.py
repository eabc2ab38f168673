"""The figures of queues and groups in the Console."""

import msgspec

from penstock.contract.queues import QueueGroup
from penstock.queues.admin.figures import QueueFigures


class WatchedQueue(msgspec.Struct):
    figures: QueueFigures
    groups: list[QueueGroup]
    unread: float | None  # how long the oldest message waits, while no group reads the queue
    pushed_rate: float | None = None

    @property
    def completed_rate(self) -> float | None:
        rates = (group.rate or 0.0 for group in self.groups)
        return None if self.pushed_rate is None else sum(rates, 0.0)

    delivered_rate = completed_rate

    @property
    def oldest(self) -> float | None:
        waits = [group.lag_seconds for group in self.groups if group.lag_seconds is not None]
        return max(waits, default=self.unread)
