"""Authenticate Kafka clients by SASL, check their roles, and record changes in the audit log.

The client sends its token as the password of PLAIN or as the token of OAUTHBEARER (RFC 7628). The
answer says when the token expires. Before that, a client may authenticate again on the same
connection. The user name of PLAIN is ignored.
"""

import time

from kio.schema.errors import ErrorCode as Code

from penstock.errors import PenstockError, Unauthorized
from penstock.monitor.audit import Record
from penstock.protocol.roles import Role
from penstock.wire.auth import Identity, Verifier
from penstock.wire.auth.verifier import UnknownKey
from penstock.wire.kafka.codec import Values
from penstock.wire.kafka.connection import KafkaConnection, KafkaRequest
from penstock.wire.kafka.errors import Refused

PLAIN, OAUTHBEARER = "PLAIN", "OAUTHBEARER"
MAX_FIRST_FRAME = 64 << 10  # bytes, before a connection has authenticated
MAX_LIFETIME = 1 << 40  # milliseconds; a token that does not expire is answered with 0


class Access:
    def __init__(self, verifier: Verifier | None) -> None:
        """`verifier` None: everyone may do everything."""
        self.verifier = verifier
        self.record: Record | None = None  # what writes changes to the audit log

    def check_known(self, connection: KafkaConnection) -> None:
        """Refuse a connection that has shown no token, or whose token has expired."""
        if self.verifier is not None:
            self.verifier.check(connection.identity, "use SASL PLAIN or OAUTHBEARER")

    def require(
        self,
        connection: KafkaConnection,
        role: Role,
        code: Code = Code.topic_authorization_failed,
    ) -> None:
        if self.verifier is None:
            return
        identity = connection.identity
        if identity is None or identity.role < role:
            self.verifier.count("role")
            raise Refused(code, f"This needs the role {role.title}")

    async def note(self, connection: KafkaConnection, action: str, thing: str) -> None:
        if self.record is not None:
            await self.record(connection.who, action, thing, {"over": "Kafka"})


class SaslRequests:
    def __init__(self, access: Access, max_frame: int) -> None:
        """`max_frame` limits the frames of an authenticated connection, in bytes."""
        self._access = access
        self._max_frame = max_frame

    def sasl_handshake(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        asked = request.body.mechanism
        known = asked in (PLAIN, OAUTHBEARER)
        connection.mechanism = asked if known else None
        code = Code.none if known else Code.unsupported_sasl_mechanism
        return {"error_code": code, "mechanisms": [PLAIN, OAUTHBEARER]}

    async def sasl_authenticate(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        mechanism, connection.mechanism = connection.mechanism, None
        connection.identity = None
        if mechanism is None:
            connection.finish_after_answer()
            return {
                "error_code": Code.illegal_sasl_state,
                "error_message": "SaslHandshake first",
            }
        try:
            token = _token(mechanism, request.body.auth_bytes)
            identity = await self._identify(token)
        except (PenstockError, UnicodeDecodeError) as error:
            connection.finish_after_answer()
            text = str(error) if isinstance(error, PenstockError) else "The token is not text"
            return {"error_code": Code.sasl_authentication_failed, "error_message": text}
        connection.identity = identity
        connection.max_frame = self._max_frame
        lifetime = (identity.expires - time.time()) * 1000 if identity is not None else MAX_LIFETIME
        return {"session_lifetime": int(lifetime) if lifetime < MAX_LIFETIME else 0}

    async def _identify(self, token: str) -> Identity | None:
        """Return the identity of a token; None if the broker requires no tokens."""
        verifier = self._access.verifier
        if verifier is None:
            return None
        try:
            return verifier.identify(token)
        except UnknownKey:
            return await verifier.learn(token)


def _token(mechanism: str, data: bytes) -> str:
    if mechanism == PLAIN:  # [authorization id] NUL user NUL password
        parts = data.split(b"\0")
        if len(parts) != 3:
            raise Unauthorized("PLAIN needs a user and a password")
        return parts[2].decode()
    for part in data.split(b"\x01"):  # n,,^Aauth=Bearer <token>^A^A
        name, _, value = part.partition(b"=")
        scheme, _, token = value.partition(b" ")
        if name == b"auth" and scheme.lower() == b"bearer":
            return token.strip().decode()
    raise Unauthorized("OAUTHBEARER has no token")
