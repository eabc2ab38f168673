"""Authenticate connections of the binary protocol. A client sends AUTH first; its token's role then
decides about other requests, until the token expires.

Another AUTH on the connection renews the token. Without a token, every other request is answered
with UNAUTHORIZED, and frames must be small. The connection stays open, so that the client can
report the reason.
"""

from collections.abc import Awaitable

from penstock.protocol import frames
from penstock.protocol.frames import Bytes, Command
from penstock.protocol.roles import Role
from penstock.wire.auth import Identity, Verifier
from penstock.wire.auth.verifier import UnknownKey
from penstock.wire.tcp.connection import TcpConnection

MAX_FIRST_FRAME = 64 << 10  # bytes of a frame from a connection without a token


class TcpTokenGuard:
    """Check whether connections are allowed to make their requests."""

    def __init__(self, verifier: Verifier, max_frame: int) -> None:
        """Create a guard. `max_frame` is the largest frame of an authenticated connection."""
        self._verifier = verifier
        self._max_frame = max_frame

    def check(self, connection: TcpConnection, role: Role) -> None:
        identity = self._verifier.check(connection.identity, "begin with AUTH and a token")
        if identity.role < role:
            self._verifier.count("role")
            identity.require(role)

    def admit(self, connection: TcpConnection, body: bytes) -> list[Bytes] | Awaitable[list[Bytes]]:
        """Set the connection's identity from a token, and return the answer to AUTH."""
        connection.identity = None
        token = body.decode("ascii", "replace").strip()
        try:
            return self._admitted(connection, self._verifier.identify(token))
        except UnknownKey:
            return self._admit_later(connection, token)

    async def _admit_later(self, connection: TcpConnection, token: str) -> list[Bytes]:
        return self._admitted(connection, await self._verifier.learn(token))

    def _admitted(self, connection: TcpConnection, identity: Identity) -> list[Bytes]:
        connection.identity = identity
        connection.max_frame = self._max_frame
        return [frames.answer(Command.AUTH)]
