"""Verify tokens and cache their identities: a cached token costs a dictionary lookup.

The cache is bounded (`cache_size`, oldest first). An entry never outlives the token's `exp`. When
the key set changes, the cache is cleared, so that tokens of a withdrawn key are refused at once.
Refused tokens are not cached: they may become valid when their key is fetched or their `nbf`
passes.
"""

import logging
import math
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from penstock.config.schema import Auth as Settings
from penstock.errors import Forbidden, Unauthorized
from penstock.metrics import Metrics
from penstock.protocol.roles import Role

log = logging.getLogger("penstock.auth")

MISSING = "Authentication required: send the header Authorization: Bearer <token>"
MAX_TOKEN_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Identity:
    subject: str | None  # the token's `sub`, stored as `producerSub`
    role: Role  # PUBLIC: the token is valid and allows nothing
    expires: float = math.inf  # seconds since 1970, including the allowed clock skew

    def require(self, role: Role) -> None:
        if self.role < role:
            has = f"has {self.role.title}" if self.role else "has no known role"
            raise Forbidden(f"This needs the role {role.title}; the token {has}")


class UnknownKey(Exception):
    """The token names an unknown key: call `learn`, then try again."""


class Verifier:
    """Verify the tokens of one process."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        # Imported here, since it needs 11 MiB only for authentication.
        import jwt

        from penstock.wire.auth.keys import TokenKeys

        self.settings = settings
        self.identities: dict[str, Identity] = {}  # never contains the empty token
        self.keys: TokenKeys = TokenKeys(settings, self.identities.clear, metrics)
        self._refused = metrics.counter(
            "penstock_auth_refused_total",
            "Requests rejected by authentication, by reason",
            "reason",
        )
        metrics.gauge(
            "penstock_auth_known_tokens",
            "Verified tokens in the cache",
            read=lambda: len(self.identities),
        )
        self._jwt = jwt
        self._decoder = jwt.PyJWT()
        self._checks: dict[str, Any] = {
            "leeway": settings.clock_skew,
            "audience": settings.audience or None,
            "issuer": settings.issuer or None,
            "options": {
                "require": ["exp"] if settings.require_exp else [],
                "verify_aud": bool(settings.audience),
                "verify_iss": bool(settings.issuer),
            },
        }

    def identify(self, token: str) -> Identity:
        """Return the identity of a token.

        Raise `Unauthorized`, or `UnknownKey` if keys must be fetched first.
        """
        identity = self.identities.get(token)
        if identity is not None:
            if identity.expires > time.time():
                return identity
            del self.identities[token]
        if not token:
            raise self._refusal("missing", MISSING)
        return self._remember(token, self._verify(token, may_ask=True))

    async def learn(self, token: str) -> Identity:
        """Fetch the keys after `UnknownKey`, and verify the token with them."""
        await self.keys.refresh()
        self.keys.require_some()
        return self._remember(token, self._verify(token, may_ask=False))

    def check(self, identity: Identity | None, how: str) -> Identity:
        """Return the identity of a connection. Refuse one that has shown no token, or whose token
        has expired. `how` says how to show one.
        """
        if identity is None:
            raise self._refusal("missing", f"Authentication required: {how}")
        if identity.expires <= time.time():
            raise self._refusal("expired", "The token has expired")
        return identity

    def count(self, reason: str) -> None:
        self._refused.add(1, reason)

    def _verify(self, token: str, may_ask: bool) -> Identity:
        if len(token) > MAX_TOKEN_BYTES:
            raise self._refusal("invalid", f"The token is longer than {MAX_TOKEN_BYTES} bytes")
        try:
            header = self._jwt.get_unverified_header(token)
        except self._jwt.PyJWTError:
            raise self._refusal("invalid", "The token is not a JWT") from None
        algorithm, key_id = header.get("alg"), header.get("kid")
        keys = self.keys.find(algorithm, key_id) if isinstance(algorithm, str) else []
        if not keys:
            if may_ask and algorithm in ("RS256", "ES256", "EdDSA") and self.keys.may_learn():
                raise UnknownKey
            self.keys.require_some()
            if algorithm not in self.keys.algorithms:
                raise self._refusal(
                    "invalid", f"The token's algorithm {str(algorithm)[:20]!r} is not accepted"
                )
            raise self._refusal("invalid", "The token is signed with a key that is not known here")
        return identity_of(
            self._claims(token, str(algorithm), [key.material for key in keys]), self.settings
        )

    def _claims(self, token: str, algorithm: str, materials: list[Any]) -> dict[str, Any]:
        for place, material in enumerate(materials, 1):
            try:
                return self._decoder.decode(token, material, algorithms=[algorithm], **self._checks)
            except self._jwt.InvalidSignatureError:
                if place == len(materials):
                    raise self._refusal("invalid", "The token's signature is wrong") from None
            except self._jwt.ExpiredSignatureError:
                raise self._refusal("expired", "The token has expired") from None
            except self._jwt.ImmatureSignatureError:
                raise self._refusal("invalid", "The token is not valid yet") from None
            except self._jwt.InvalidAudienceError:
                raise self._refusal("invalid", "The token is for another audience") from None
            except self._jwt.InvalidIssuerError:
                raise self._refusal("invalid", "The token is from another issuer") from None
            except self._jwt.MissingRequiredClaimError as error:
                raise self._refusal(
                    "invalid", f"The token lacks the claim {error.claim!r}"
                ) from None
            except self._jwt.PyJWTError:
                raise self._refusal("invalid", "The token cannot be verified") from None
        raise AssertionError("there is always a key")

    def _remember(self, token: str, identity: Identity) -> Identity:
        identities = self.identities
        if len(identities) >= max(1, self.settings.cache_size):
            now = time.time()
            for old in [each for each, about in identities.items() if about.expires <= now] or [
                next(iter(identities))
            ]:
                del identities[old]
        identities[token] = identity
        return identity

    def _refusal(self, reason: str, text: str) -> Unauthorized:
        self.count(reason)
        return Unauthorized(text)


def verifier_of(settings: Settings, metrics: Metrics) -> Verifier | None:
    """Return the verifier; None when authentication is off."""
    return Verifier(settings, metrics) if settings.enabled else None


def bearer(header: str | None, query: str = "") -> str:
    """Return the token of an `Authorization` header or of a query string."""
    if header:
        scheme, _, rest = header.strip().partition(" ")
        if not rest:
            return scheme
        return rest.strip() if scheme.lower() == "bearer" else ""
    return (parse_qs(query).get("access_token") or [""])[0] if query else ""


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
