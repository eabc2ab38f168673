"""Authenticate requests: verify tokens (JWT), cache them until they expire, map them to roles."""

from penstock.protocol.roles import Role
from penstock.wire.auth.verifier import Identity, Verifier, verifier_of

__all__ = ["Identity", "Role", "Verifier", "verifier_of"]
