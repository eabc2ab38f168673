"""The keys that verify tokens: a shared secret, a public key, or the keys of an identity provider.

A key is used with exactly one algorithm, regardless of the header of a token. So a token that is
signed with HS256 and the text of a public key matches no key, and neither does `none`.

A key set (JWKS) is fetched every `jwks_refresh`. A token with an unknown key triggers a fetch too,
at most every `UNKNOWN_KEY_SECONDS`, so that forged tokens cannot flood the provider. If a fetch
fails, the old keys stay valid.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from penstock.config.schema import Auth as Settings
from penstock.errors import ConfigError, PenstockError, Unavailable
from penstock.io.tasks import supervised
from penstock.metrics import Metrics
from penstock.net import HttpClient

log = logging.getLogger("penstock.auth")

UNKNOWN_KEY_SECONDS = 10.0  # least time between two fetches for unknown keys
RETRY_SECONDS = 30.0  # until a failed fetch is repeated
MIN_SECRET_BYTES = 32  # the size of an HS256 hash
MIN_RSA_BITS = 2048
MAX_SET_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TokenKey:
    algorithm: str
    material: Any
    id: str | None = None


class TokenKeys:
    """Configured and fetched keys. A fetch that changes the keys calls `changed`."""

    def __init__(
        self,
        settings: Settings,
        changed: Callable[[], None] = lambda: None,
        metrics: Metrics | None = None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._changed = changed
        self._fixed = _configured(settings)
        self._fetched: list[TokenKey] = []
        self._raw = b""  # the document of `_fetched`
        self._fetching: asyncio.Task[None] | None = None  # the fetch in flight
        self._refreshing: asyncio.Task[None] | None = None
        self._last = -UNKNOWN_KEY_SECONDS  # when the last fetch began
        self._ever = False  # a fetch has succeeded
        if not self._fixed and not settings.jwks_url:
            raise ConfigError(
                "auth.enabled needs a key to verify tokens:"
                " auth.secret, auth.public_key or auth.jwks_url"
            )

    @property
    def algorithms(self) -> set[str]:
        return {key.algorithm for key in self._all()}

    def find(self, algorithm: str, key_id: str | None) -> list[TokenKey]:
        """Return the keys that may have signed a token with this header."""
        fitting = [key for key in self._all() if key.algorithm == algorithm]
        if key_id is None:
            return fitting
        return [key for key in fitting if key.id == key_id] or [
            key for key in fitting if key.id is None
        ]

    def may_learn(self) -> bool:
        """Return True if a fetch now could bring an unknown key."""
        if not self._settings.jwks_url:
            return False
        return self._fetching is not None or time.monotonic() - self._last >= UNKNOWN_KEY_SECONDS

    async def start(self) -> None:
        if self._settings.jwks_url:
            await self.refresh()
            self._refreshing = supervised("token keys", self._keep_fresh, self._metrics)

    async def stop(self) -> None:
        tasks = [task for task in (self._refreshing, self._fetching) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def refresh(self) -> None:
        """Fetch now, or wait for the fetch in flight."""
        if self._fetching is None:
            self._last = time.monotonic()
            self._fetching = asyncio.create_task(self._fetch())
            self._fetching.add_done_callback(self._fetched_now)
        await asyncio.shield(self._fetching)

    def require_some(self) -> None:
        if not self._fixed and not self._ever:
            raise Unavailable(
                "The keys that verify tokens could not be fetched yet",
                retry_after=UNKNOWN_KEY_SECONDS,
            )

    def _all(self) -> list[TokenKey]:
        return self._fixed + self._fetched

    def _fetched_now(self, _: "asyncio.Task[None]") -> None:
        self._fetching = None

    async def _keep_fresh(self) -> None:
        while True:
            interval = max(1.0, self._settings.jwks_refresh)
            await asyncio.sleep(interval if self._ever else min(RETRY_SECONDS, interval))
            await self.refresh()

    async def _fetch(self) -> None:
        try:
            raw = await _read(self._settings.jwks_url)
            keys = key_set(raw, self._settings.algorithm)
        except (PenstockError, TimeoutError, OSError, ValueError) as error:
            kept = f"{len(self._fetched)} keys are kept"
            outcome = kept if self._ever else "no token is accepted until they are"
            url = self._settings.jwks_url
            log.error("the keys at %s could not be read, %s: %s", url, outcome, error)
            return
        self._ever = True
        if raw != self._raw:
            self._raw, self._fetched = raw, keys
            self._changed()
            log.info("%d keys that verify tokens read from %s", len(keys), self._settings.jwks_url)


def _configured(settings: Settings) -> list[TokenKey]:
    keys = []
    if settings.secret and _wanted("HS256", settings.algorithm):
        secret = settings.secret.encode()
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"auth.secret must have at least {MIN_SECRET_BYTES} bytes:"
                " a shorter one can be guessed"
            )
        keys.append(TokenKey("HS256", secret))
    if settings.public_key:
        key = _public_key(settings.public_key)
        if not _wanted(key.algorithm, settings.algorithm):
            raise ConfigError(
                f"auth.public_key is a key for {key.algorithm},"
                f" but auth.algorithm is {settings.algorithm}"
            )
        keys.append(key)
    return keys


def _wanted(algorithm: str, configured: str) -> bool:
    return configured in ("auto", algorithm.lower())


def _public_key(text: str) -> TokenKey:
    """Load a key from PEM text (with real or escaped line ends), or from a file."""
    try:
        pem = (
            text.replace("\\n", "\n")
            if "-----BEGIN" in text
            else Path(text).read_text(encoding="ascii")
        )
        return _key_for(load_pem_public_key(pem.encode()), None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"auth.public_key is neither a public key (PEM) nor a file with one: {error}"
        ) from None


def _key_for(material: Any, key_id: str | None) -> TokenKey:
    if isinstance(material, RSAPublicKey):
        if material.key_size < MIN_RSA_BITS:
            raise ValueError(
                f"an RSA key of {material.key_size} bits is too short, {MIN_RSA_BITS} is the least"
            )
        return TokenKey("RS256", material, key_id)
    if isinstance(material, Ed25519PublicKey):
        return TokenKey("EdDSA", material, key_id)
    if isinstance(material, EllipticCurvePublicKey) and isinstance(material.curve, SECP256R1):
        return TokenKey("ES256", material, key_id)
    raise ValueError("only RSA, Ed25519 and P-256 keys are supported")


def key_set(raw: bytes, algorithm: str = "auto") -> list[TokenKey]:
    """Return the keys of a JWKS document that can verify signatures; ignore others."""
    document = json.loads(raw)
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError("not a key set: the array `keys` is missing")
    keys = []
    for entry in entries:
        try:
            if entry.get("use", "sig") != "sig" or entry.get("kty") == "oct":
                continue
            key = _key_for(jwt.PyJWK(entry).key, entry.get("kid"))
        except (jwt.PyJWTError, ValueError, AttributeError, UnsupportedAlgorithm) as error:
            log.info("ignored a key of the set: %s", error)
            continue
        if entry.get("alg", key.algorithm) == key.algorithm and _wanted(key.algorithm, algorithm):
            keys.append(key)
    return keys


async def _read(url: str) -> bytes:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        path = Path(parts.path if parts.scheme == "file" else url)
        return await asyncio.to_thread(path.read_bytes)
    client = HttpClient(
        urlunsplit((parts.scheme, parts.netloc, "", "", "")), pool_size=1, max_answer=MAX_SET_BYTES
    )
    try:
        answer = await client.request(
            "GET", urlunsplit(("", "", parts.path or "/", parts.query, "")), timeout=10.0
        )
    finally:
        await client.close()
    if answer.status != 200:
        raise ValueError(f"answered {answer.status}")
    return answer.body
