"""The figures of queues and groups as somebody who watches sees them."""

import msgspec


class Group(msgspec.Struct, rename="camel"):
    """Counts and rates of a consumer group."""

    name: str  # empty: queue mode
    lag: int
    lag_seconds: float | None
    leased: int
    acked: int  # completed
    failed: int
    dead: int  # dead letters
    dropped: int
    skipped: int
    consumers: int | None  # connections that pop for it, at all brokers
    rate: float | None  # completed per second


class Queue(msgspec.Struct, rename="camel"):
    name: str
    namespace: str
    task: str
    stored: int
    pushed: int
    pushed_rate: float | None
    delivered_rate: float | None
    dead_letters: int
    groups: list[Group]
    unread: float | None  # how long the oldest message waits, while no group reads the queue

    @property
    def waiting(self) -> int:
        """The largest lag of its groups; all that is stored while it has none."""
        return max((group.lag for group in self.groups), default=self.stored)

    @property
    def leased(self) -> int:
        return sum(group.leased for group in self.groups)

    @property
    def oldest(self) -> float | None:
        waits = [group.lag_seconds for group in self.groups if group.lag_seconds is not None]
        return max(waits, default=self.unread)
