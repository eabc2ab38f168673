"""Issue tokens, for `penstock token`.

The `Verifier` of the same settings checks each token, so that a wrong key, audience or claim is
reported here, and not as a 401 of the broker.
"""

import time

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from penstock.config.schema import Auth as Settings
from penstock.errors import ConfigError, Unauthorized
from penstock.metrics import Metrics
from penstock.protocol.roles import Role
from penstock.wire.auth.verifier import UnknownKey, Verifier

ALGORITHMS = {RSAPrivateKey: "RS256", EllipticCurvePrivateKey: "ES256", Ed25519PrivateKey: "EdDSA"}
NO_SECRET = (
    "auth.secret is not set: pass the broker's configuration (-c FILE, JWT_SECRET), "
    "or the key of its auth.public_key (--private-key FILE). A new secret: openssl rand -hex 32"
)


def issue(
    settings: Settings, role: Role, subject: str, seconds: float, pem: bytes | None = None
) -> str:
    """Return a token that a broker with these settings accepts; `pem`: the private key."""
    names = {
        Role.READ_ONLY: settings.role_read_only,
        Role.READ_WRITE: settings.role_read_write,
        Role.ADMIN: settings.role_admin,
    }
    now = int(time.time())
    claims: dict[str, object] = {
        "sub": subject,
        settings.roles_claim: names[role],
        "iat": now,
        "exp": now + max(1, round(seconds)),
    }
    if settings.issuer:
        claims["iss"] = settings.issuer
    if settings.audience:
        claims["aud"] = settings.audience
    if pem is None and not settings.secret:
        raise ConfigError(NO_SECRET)
    verifier = Verifier(settings, Metrics())  # first, because it refuses weak keys
    token = _signed(claims, settings.secret.encode() if pem is None else pem, pem is not None)
    try:
        identity = verifier.identify(token)
    except UnknownKey:  # an identity provider's key, which only a running broker fetches
        return token
    except Unauthorized as error:
        raise ConfigError(
            f"a broker with this configuration would refuse the token: {error}"
        ) from None
    if identity.role != role:
        raise ConfigError(f"auth.roles_claim {settings.roles_claim!r} does not carry the role")
    return token


def _signed(claims: dict[str, object], key: bytes, private: bool) -> str:
    if not private:
        return jwt.encode(claims, key, "HS256")
    try:
        material = load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"a private key in PEM without a password is needed: {error}") from None
    for kind, algorithm in ALGORITHMS.items():
        if isinstance(material, kind):
            return jwt.encode(claims, key, algorithm)
    raise ConfigError("the private key must be RSA, P-256 or Ed25519")
