"""Authenticate requests: verify tokens (JWT), cache them until they expire, map them to roles."""

from penstock.protocol.roles import Role
from penstock.wire.auth.identity import Identity
from penstock.wire.auth.verifier import Verifier, verifier_of

__all__ = ["Identity", "Role", "Verifier", "verifier_of"]
