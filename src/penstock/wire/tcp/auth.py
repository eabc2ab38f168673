"""The binary protocol with authentication on: AUTH first, then what the token's role allows, until
it expires.

A token may be renewed on the connection by another AUTH. A connection that has shown none gets
UNAUTHORIZED for every other request (and stays, so that a client can tell its user why), and may
send small frames only.
"""

import time
from collections.abc import Awaitable
from typing import Any

from penstock.errors import PenstockError, Unauthorized
from penstock.protocol import frames
from penstock.protocol.frames import REQUEST, Command
from penstock.wire.auth import Identity, Role, Verifier
from penstock.wire.auth.verifier import UnknownKey
from penstock.wire.tcp.commands import Answer, Commands, Pieces
from penstock.wire.tcp.connection import Connection, failure

FIRST_FRAME = 64 << 10
READS = frozenset(
    (
        Command.CONSUME,
        Command.NEXT_OFFSET,
        Command.LIST_TOPICS,
        Command.FETCH,
        Command.OFFSET_AT,
        Command.TOPIC_INFO,
        Command.GROUP_FETCH,
    )
)


class GuardedCommands(Commands):
    def __init__(self, verifier: Verifier, *parts: Any) -> None:
        super().__init__(*parts)
        self._verifier = verifier
        self.first_frame = min(FIRST_FRAME, self.max_frame)

    def run(self, connection: Connection, command: int, body: memoryview) -> Answer:
        if command == Command.AUTH:
            self._count(1, "auth")
            return self._admit(connection, bytes(body))
        self._check(connection, command)
        return super().run(connection, command, body)

    def produce(self, connection: Connection, data: bytes | bytearray, at: int, end: int) -> int:
        try:
            self._check(connection, Command.PRODUCE)
        except PenstockError as error:
            self._count(1, "produce")
            connection.answer(failure(error))
            return at + REQUEST.size + int(REQUEST.unpack_from(data, at)[1])
        return super().produce(connection, data, at, end)

    def _check(self, connection: Connection, command: int) -> None:
        identity = connection.identity
        if identity is None:
            self._verifier.count("missing")
            raise Unauthorized("Authentication required: begin with AUTH and a token")
        if identity.expires <= time.time():
            self._verifier.count("expired")
            raise Unauthorized("The token has expired")
        role = role_of(command)
        if identity.role < role:
            self._verifier.count("role")
            identity.require(role)

    def _admit(self, connection: Connection, body: bytes) -> Pieces | Awaitable[Pieces]:
        connection.identity = None
        token = body.decode("ascii", "replace").strip()
        try:
            return self._admitted(connection, self._verifier.identify(token))
        except UnknownKey:
            return self._learn(connection, token)

    async def _learn(self, connection: Connection, token: str) -> Pieces:
        return self._admitted(connection, await self._verifier.learn(token))

    def _admitted(self, connection: Connection, identity: Identity) -> Pieces:
        connection.identity = identity
        connection.max_frame = self.max_frame
        return [frames.answer(Command.AUTH)]


def role_of(command: int) -> Role:
    if command == Command.DELETE_TOPIC:
        return Role.ADMIN
    return Role.READ_ONLY if command in READS else Role.READ_WRITE
