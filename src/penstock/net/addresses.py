"""Parse addresses of brokers and credentials as users write them."""

import base64
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlencode

from penstock.errors import InvalidRequest

DEFAULT_PORT = "12345"
TOKEN_VARIABLE = "PENSTOCK_TOKEN"
Address = tuple[str, int]
# A function is called whenever a token is needed, for tokens that are renewed.
Token = str | Callable[[], str]


def parse_addresses(addresses: str | Sequence[str | Address]) -> tuple[list[Address], bool]:
    """Parse `"a:1,b:2"`, `["tls://a:1"]` or `[("a", 1)]`; the default port is 12345. Also return
    whether to use TLS, which is the same for all of them.
    """
    parsed: list[Address] = []
    secure: set[bool] = set()
    for part in addresses.split(",") if isinstance(addresses, str) else addresses:
        secure.add(isinstance(part, str) and part.strip().startswith("tls://"))
        if isinstance(part, tuple):
            parsed.append(part)
            continue
        plain = part.strip().removeprefix("tcp://").removeprefix("tls://").removesuffix("/")
        host, colon, port = plain.rpartition(":")
        if not colon or port.endswith("]"):
            host, port = plain, DEFAULT_PORT
        if not host or not port.isdecimal() or "/" in host:
            raise InvalidRequest(
                f"{part!r} is not a broker address: write host:port, or tls://host:port"
            )
        parsed.append((host.strip("[]"), int(port)))
    if not parsed:
        raise InvalidRequest("no broker address given")
    if len(secure) > 1:
        raise InvalidRequest(f"either all addresses begin with tls:// or none: {addresses!r}")
    return parsed, secure == {True}


def resource(*parts: str, **query: Any) -> str:
    """Return the target of a request. Names are quoted; query parameters of None are left out."""
    path = "/".join([parts[0], *(quote(part, safe="") for part in parts[1:])])
    given = {key: value for key, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def basic_authorization(url: SplitResult) -> str:
    """Return the Authorization header for the user and password of a URL; empty if it has none."""
    if url.username is None:
        return ""
    secret = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return f"Basic {base64.b64encode(secret.encode()).decode()}"
