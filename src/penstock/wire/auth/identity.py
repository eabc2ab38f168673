"""The identity in a verified token: subject, role and expiry."""

import math
from dataclasses import dataclass
from typing import Any

from penstock.config.schema import Auth as Settings
from penstock.errors import Forbidden
from penstock.protocol.roles import Role


@dataclass(frozen=True, slots=True)
class Identity:
    subject: str | None  # the token's `sub`, stored as `producerSub`
    role: Role  # PUBLIC: the token is valid and allows nothing
    expires: float = math.inf  # seconds since 1970, including the allowed clock skew

    def require(self, role: Role) -> None:
        if self.role < role:
            has = f"has {self.role.title}" if self.role else "has no known role"
            raise Forbidden(f"This needs the role {role.title}; the token {has}")


def identity_of(claims: dict[str, Any], settings: Settings) -> Identity:
    expires = claims.get("exp")
    return Identity(
        subject=claims.get("sub"),
        role=_role(claims, settings),
        expires=math.inf if expires is None else float(expires) + settings.clock_skew,
    )


def _role(claims: dict[str, Any], settings: Settings) -> Role:
    """Return the highest of the roles in both claims."""
    levels = {
        settings.role_read_only: Role.READ_ONLY,
        settings.role_read_write: Role.READ_WRITE,
        settings.role_admin: Role.ADMIN,
    }
    highest = Role.PUBLIC
    for name in (settings.roles_claim, settings.roles_array_claim):
        value = _claim(claims, name)
        for word in value if isinstance(value, list) else [value]:
            if isinstance(word, str) and word:
                highest = max(highest, levels.get(word, Role.PUBLIC))
    return highest


def _claim(claims: dict[str, Any], name: str) -> Any:
    """Return a claim by its name, or by a path with dots (`realm_access.roles`)."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for word in name.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(word)
    return value
