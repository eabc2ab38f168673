"""The binary protocol with authentication on: AUTH first, then what the token's role allows, until
it expires.

A token may be renewed on the connection by another AUTH. A connection that has shown none gets
UNAUTHORIZED for every other request (and stays, so that a client can tell its user why), and may
send small frames only.
"""

import time
from collections.abc import Awaitable

from penstock.errors import Unauthorized
from penstock.protocol import frames
from penstock.protocol.frames import Bytes, Command
from penstock.protocol.roles import Role
from penstock.wire.auth import Identity, Verifier
from penstock.wire.auth.verifier import UnknownKey
from penstock.wire.tcp.connection import TcpConnection

MAX_FIRST_FRAME = 64 << 10  # bytes of a frame from a connection that has shown no token


class TcpTokenGuard:
    """Says whether a connection may do what it asks for."""

    def __init__(self, verifier: Verifier, max_frame: int) -> None:
        """`max_frame`: the largest frame of a connection that has shown its token."""
        self._verifier = verifier
        self._max_frame = max_frame

    def check(self, connection: TcpConnection, role: Role) -> None:
        identity = connection.identity
        if identity is None:
            self._verifier.count("missing")
            raise Unauthorized("Authentication required: begin with AUTH and a token")
        if identity.expires <= time.time():
            self._verifier.count("expired")
            raise Unauthorized("The token has expired")
        if identity.role < role:
            self._verifier.count("role")
            identity.require(role)

    def admit(self, connection: TcpConnection, body: bytes) -> list[Bytes] | Awaitable[list[Bytes]]:
        """The answer to AUTH; from now on the connection is whoever the token names."""
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
