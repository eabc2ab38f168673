"""Where brokers are and what they are shown, as users write it."""

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from penstock.errors import InvalidRequest

DEFAULT_PORT = "12345"
TOKEN_VARIABLE = "PENSTOCK_TOKEN"
Address = tuple[str, int]
# A function is asked whenever a token is needed: for tokens that are renewed.
Token = str | Callable[[], str]


def parse_addresses(addresses: str | Sequence[str | Address]) -> list[Address]:
    """`"a:1,b:2"`, `["tls://a:1"]` or `[("a", 1)]`; the port is 12345 when none is named."""
    parsed: list[Address] = []
    for part in _parts(addresses):
        if isinstance(part, tuple):
            parsed.append(part)
            continue
        plain = part.strip().removeprefix("tcp://").removeprefix("tls://").removesuffix("/")
        host, colon, port = plain.rpartition(":")
        if not colon or port.endswith("]"):
            host, port = plain, DEFAULT_PORT
        if not host or not port.isdecimal() or "/" in host:
            raise InvalidRequest(
                f"{part!r} is no broker address: write host:port, or tls://host:port"
            )
        parsed.append((host.strip("[]"), int(port)))
    if not parsed:
        raise InvalidRequest("no broker address given")
    return parsed


def wants_tls(addresses: str | Sequence[str | Address]) -> bool:
    """Whether the addresses say `tls://`; all of them, or none."""
    kinds = {
        isinstance(part, str) and part.strip().startswith("tls://") for part in _parts(addresses)
    }
    if len(kinds) > 1:
        raise InvalidRequest(f"either all addresses begin with tls:// or none: {addresses!r}")
    return kinds == {True}


def _parts(addresses: str | Sequence[str | Address]) -> Sequence[str | Address]:
    return addresses.split(",") if isinstance(addresses, str) else addresses


def resource(*parts: str, **query: Any) -> str:
    """The target of a request: parts that hold names are quoted, None in the query is left out."""
    path = "/".join([parts[0], *(quote(part, safe="") for part in parts[1:])])
    given = {key: value for key, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def token_text(token: Token | None) -> str:
    return (token if isinstance(token, str) else token()) if token else ""
