"""Errors that a caller may want to catch, named by what the caller can do about them.

The wire layer maps them to HTTP, TCP and WebSocket statuses in one place
(`penstock.protocol.status`). The client maps statuses back to the same classes, so `except
penstock.errors.Unavailable` means the same on both sides.
"""

from typing import Any


class PenstockError(Exception):
    """Base class of all errors that Penstock raises on purpose. The text is written for people and
    is safe to send to a client.
    """


class ConfigError(PenstockError):
    """The configuration is invalid; nothing was started."""


class InvalidRequest(PenstockError):
    """The request is invalid and will never succeed; fix it before you send it again."""


class Unauthorized(PenstockError):
    """The credentials are missing or invalid."""


class Forbidden(PenstockError):
    """The credentials are valid but do not permit this operation."""


class NotFound(PenstockError):
    """The object named in the request does not exist."""


class InvalidOffset(PenstockError):
    """The log has no such offset: retention deleted it, or it was never written."""


class Conflict(PenstockError):
    """The request conflicts with the current state: a lease was lost, or a transaction cannot be
    applied.
    """


class TooLarge(PenstockError):
    """The request or a payload in it exceeds a configured limit."""


class Full(PenstockError):
    """A configured limit is reached for now: `maxSize` of a queue, or a full send queue with the
    policy `block`.
    """


class QueueFull(Full):
    """Some messages of a push did not fit into the queue (`maxSize`). `results` shows which
    (`penstock.types.Pushed`); the others are stored.
    """

    def __init__(self, text: str, results: list[Any]) -> None:
        super().__init__(text)
        self.results = results


class AckRefused(Conflict):
    """The broker rejected some acks: the lease was lost, or the message was deleted. `results`
    shows which (`penstock.types.Acked`).
    """

    def __init__(self, text: str, results: list[Any]) -> None:
        super().__init__(text)
        self.results = results


class Unavailable(PenstockError):
    """A component that the request needs is down or shutting down; retry after `retry_after`
    seconds.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ConnectionLost(Unavailable):
    """A connection to a broker, or from a broker to its database, was lost before the answer
    arrived. The request may have been executed.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after=0.1)


class Busy(Unavailable):
    """The database answers but cannot execute the request now: its disk is full, a lock is held, or
    it is overloaded.
    """


class MissingKey(Unavailable):
    """The queue is encrypted with a key that this broker does not have. Its messages are neither
    stored nor buffered until the broker gets the key.
    """


class StorageError(PenstockError):
    """The disk accepts no writes for now. Base class of `StorageFull` and `StorageFailed`."""


class StorageFull(StorageError):
    """The disk, or the configured limit on it, is full; nothing was stored."""


class StorageFailed(StorageError):
    """A write or an fsync failed; nothing of this request was acknowledged."""


class Damaged(PenstockError):
    """Stored data is corrupt: it does not match its checksum or its framing. The text names the
    file and the position.

    `resume` is the next readable offset, if there is one.
    """

    def __init__(self, message: str, resume: int | None = None) -> None:
        super().__init__(message)
        self.resume = resume


class Locked(PenstockError):
    """Another process holds the lock on a directory: the data directory, or that of a route."""
