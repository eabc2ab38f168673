"""What export needs of the parts beside it, and no more: topics to read and append to, queues to
pop and push.
"""

from collections.abc import Sequence
from typing import Any, Protocol


class TopicPort(Protocol):
    """A topic, as `penstock.topics.Topic` is one."""

    @property
    def incarnation(self) -> str: ...

    @property
    def first_offset(self) -> int: ...

    @property
    def next_offset(self) -> int: ...

    def read(self, offset: int, max_records: int = ..., max_bytes: int = ...) -> Any:
        """Records from `offset` on: has `payloads()`, `first_offset`, `next_offset`, `count`."""

    def append(self, payloads: Sequence[bytes]) -> Any:
        """An awaitable: done when they are as durable as the topic promises."""

    async def wait_for(self, offset: int, timeout: float | None = None) -> bool: ...


class TopicsPort(Protocol):
    def get(self, name: str) -> Any: ...

    async def create(self, name: str) -> Any: ...


class Popped(Protocol):
    """Messages under one lease."""

    payloads: list[bytes]


class QueuePort(Protocol):
    """Queues, reduced to what a route does with them."""

    async def pop(self, queue: str, group: str, batch: int, timeout: float, holder: int) -> Popped:
        """Lease up to `batch` messages as `holder`; waits up to `timeout` for the first one."""

    async def ack(self, popped: Any) -> None: ...

    async def renew(self, popped: Any, seconds: int) -> None:
        """Let the lease live for at least `seconds` from now."""

    async def release(self, queue: str, group: str, holder: int) -> int:
        """End the leases of `holder`, and of nobody else; how many there were."""

    async def lag(self, queue: str, group: str) -> int | None:
        """Messages of the queue that the group has not acknowledged; None when there is no such
        queue or group.
        """

    async def push(self, queue: str, partition: str, payloads: list[bytes], key: str) -> None:
        """Store messages; pushing them again under the same key stores nothing twice. Raises errors
        of `penstock`.
        """
