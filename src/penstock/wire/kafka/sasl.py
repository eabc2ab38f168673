"""SASL: a token is the password of PLAIN or the token of OAUTHBEARER (RFC 7628).

The answer says when the token expires. A client may authenticate again on the same connection
before that. The user name of PLAIN is ignored.
"""

import time

from kio.schema.errors import ErrorCode as Code

from penstock.errors import PenstockError, Unauthorized
from penstock.wire.auth import Identity
from penstock.wire.auth.verifier import UnknownKey
from penstock.wire.kafka.access import Access
from penstock.wire.kafka.codec import Values
from penstock.wire.kafka.connection import KafkaConnection, KafkaRequest

PLAIN, OAUTHBEARER = "PLAIN", "OAUTHBEARER"
MAX_FIRST_FRAME = 64 << 10  # bytes, before a connection has authenticated
MAX_LIFETIME = 1 << 40  # milliseconds; a token that does not expire is answered with 0


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
