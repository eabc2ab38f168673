"""Who may do what over Kafka: the token's role, as everywhere; and the log of changes."""

import time

from penstock.errors import Forbidden, Unauthorized
from penstock.monitor.audit import Record
from penstock.protocol.roles import Role
from penstock.wire.auth import Verifier
from penstock.wire.kafka.connection import KafkaConnection


class Access:
    def __init__(self, verifier: Verifier | None) -> None:
        """`verifier` None: everyone may do everything."""
        self.verifier = verifier
        self.record: Record | None = None  # what writes changes to the audit log

    def check_known(self, connection: KafkaConnection) -> None:
        """Refuse a connection that has shown no token, or whose token has expired."""
        if self.verifier is None:
            return
        identity = connection.identity
        if identity is None:
            self.verifier.count("missing")
            raise Unauthorized("Authentication required: use SASL PLAIN or OAUTHBEARER")
        if identity.expires <= time.time():
            self.verifier.count("expired")
            raise Unauthorized("The token has expired")

    def require(self, connection: KafkaConnection, role: Role) -> None:
        if self.verifier is None:
            return
        identity = connection.identity
        if identity is None or identity.role < role:
            self.verifier.count("role")
            raise Forbidden(f"This needs the role {role.title}")

    async def note(self, connection: KafkaConnection, action: str, thing: str) -> None:
        if self.record is not None:
            await self.record(connection.who, action, thing, {"over": "Kafka"})
