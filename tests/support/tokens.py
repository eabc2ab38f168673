"""Keys, tokens made with them, and an identity provider that publishes them."""

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import get_default_algorithms

SECRET = "a secret of thirty-two bytes or more"
DAY = 86_400.0  # tokens made when a module is imported are used much later on a slow machine
ISSUER, AUDIENCE = "https://issuer.test", "penstock"


def private_key(kind: str, number: int = 0) -> Any:
    """RS256, ES256 or EdDSA; `number` tells apart several of one kind."""
    return _made(kind, number)


@cache
def _made(kind: str, number: int) -> Any:
    if kind == "RS256":
        return rsa.generate_private_key(65537, 2048)
    return (
        ec.generate_private_key(ec.SECP256R1())
        if kind == "ES256"
        else ed25519.Ed25519PrivateKey.generate()
    )


def pem(key: Any) -> str:
    return (
        key.public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        .decode()
    )


def jwk(kind: str, key_id: str, number: int = 0, **more: Any) -> dict[str, Any]:
    made = get_default_algorithms()[kind].to_jwk(private_key(kind, number).public_key())
    return {**json.loads(made), "kid": key_id, **more}


def token(
    role: str | None = "admin",
    subject: str | None = "alice",
    *,
    lifetime: float | None = DAY,
    **claims: Any,
) -> str:
    """Signed with the secret, for the issuer and audience above."""
    return signed(claims_of(role, subject, lifetime=lifetime, **claims), SECRET, "HS256")


def claims_of(
    role: str | None = "admin",
    subject: str | None = "alice",
    lifetime: float | None = DAY,
    **claims: Any,
) -> dict[str, Any]:
    result = {"sub": subject, "role": role, "iss": ISSUER, "aud": AUDIENCE, **claims}
    if lifetime is not None:
        result["exp"] = math.ceil(
            time.time() + lifetime
        )  # whole seconds, as issuers write it: up to one more
    return {name: value for name, value in result.items() if value is not None}


def signed(claims: dict[str, Any], key: Any, algorithm: str, **header: Any) -> str:
    return jwt.encode(claims, key, algorithm, headers=header or None)


def bearer(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


class Provider:
    """Publishes `keys` at `url`; `fails` makes it answer 500."""

    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] = []
        self.fails = False
        self.asked = 0
        self.url = ""


@contextmanager
def provider(*keys: dict[str, Any]) -> Iterator[Provider]:
    result = Provider()
    result.keys = list(keys)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            result.asked += 1
            body = json.dumps({"keys": result.keys}).encode()
            self.send_response(500 if result.fails else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    result.url = f"http://127.0.0.1:{server.server_address[1]}/keys?v=1"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield result
    finally:
        server.shutdown()
        server.server_close()
