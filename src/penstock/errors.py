"""Every error a caller may want to catch, named by what the caller can do about it.

The wire layer turns them into HTTP, TCP and WebSocket statuses in one place
(`penstock.protocol.status`); the client turns those statuses back into the same classes, so `except
penstock.errors.Unavailable` means the same on both sides.
"""


class PenstockError(Exception):
    """Base of all errors Penstock raises on purpose. The text is meant for a person and is safe to
    send to a client.
    """


class ConfigError(PenstockError):
    """The configuration is wrong; nothing was started."""


class InvalidRequest(PenstockError):
    """The request can never succeed as it is: fix it before sending it again."""


class Unauthorized(PenstockError):
    """No valid credentials were presented."""


class Forbidden(PenstockError):
    """The credentials are valid but do not allow this."""


class NotFound(PenstockError):
    """The thing named in the request does not exist."""


class InvalidOffset(PenstockError):
    """The offset lies outside what the log holds (aged out, or never written)."""


class Conflict(PenstockError):
    """The request contradicts the current state (a lease lost, a transaction that cannot be
    applied).
    """


class TooLarge(PenstockError):
    """The request or a payload in it is larger than a configured limit."""


class Full(PenstockError):
    """A configured capacity is used up for now (`maxSize`, a send queue under `block`)."""


class Unavailable(PenstockError):
    """A part the request needs is down or stopping; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ConnectionLost(Unavailable):
    """A connection was lost before the answer came, to a broker or from a broker to its database:
    the request may or may not have been done.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after=0.1)


class Busy(Unavailable):
    """The database answers and does not do this for now: its disk is full, a lock is held, it is
    overloaded.
    """


class MissingKey(Unavailable):
    """A queue asks for encryption with a key this broker was not given; its payloads are stored
    nowhere meanwhile.
    """


class StorageError(PenstockError):
    """The disk takes nothing for now; catches both `StorageFull` and `StorageFailed`."""


class StorageFull(StorageError):
    """The disk (or the byte cap on it) is full; nothing was accepted."""


class StorageFailed(StorageError):
    """The disk refused a write or an fsync; nothing of this request was acknowledged."""


class Damaged(PenstockError):
    """Stored bytes do not match their checksum or their framing; the text names the file and the
    place.

    `resume` is the next offset that can be read again, where there is one.
    """

    def __init__(self, message: str, resume: int | None = None) -> None:
        super().__init__(message)
        self.resume = resume


class Locked(PenstockError):
    """Another process holds what this one needs (the data directory, a route's directory)."""
