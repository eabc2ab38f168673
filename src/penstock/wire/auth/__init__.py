"""Who is asking: tokens (JWT) verified once, remembered until they expire, and the role each one
carries.
"""

from penstock.protocol.roles import Role
from penstock.wire.auth.identity import Identity
from penstock.wire.auth.verifier import Verifier, verifier_of

__all__ = ["Identity", "Role", "Verifier", "verifier_of"]
