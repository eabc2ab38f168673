"""Checks that several destinations share. Each returns problems, which begin with the key.

The broker reads the files that a definition names, and may read files that a user of the API may
not. So over the API, `ca` is the text of a PEM file, or the name of a file in the directory
`exporter.certificates`, which the operator fills. Only the broker's log has the details of an
unusable file.
"""

import re
import ssl
import unicodedata
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from penstock.errors import ConfigError, InvalidRequest
from penstock.net.tls import client_context, is_pem

CA_HINT = (
    "destination.ca cannot be used: give the text of a PEM file, or the name of one in the "
    "broker's directory exporter.certificates (the broker's log has the reason)"
)
_NO_ADDRESS = re.compile(r"[^\x21-\x7e]")


class UnusableCa(Exception):
    """The certificates of a `ca` cannot be read."""


def ca_context(ca: str) -> ssl.SSLContext | None:
    """Return a context that trusts `ca`; None for "", which stands for the system's CAs."""
    try:
        return client_context(ca) if ca else None
    except InvalidRequest as error:
        raise UnusableCa(str(error)) from error


def ca_from_api(ca: str, certificates: Path, *, stored: bool) -> str:
    if not ca or is_pem(ca):
        return ca
    if not any(bad in ca for bad in "/\\\0") and ca not in (".", ".."):
        return str(certificates / ca)
    if not stored:
        raise ConfigError(CA_HINT)
    return ca


def url_problems(url: str, *schemes: str) -> list[str]:
    """Check an address without repeating any of it: it may contain a password."""
    if _NO_ADDRESS.search(url):
        return ["url contains a space or a character that must be written as %XX"]
    wrong = f"url must be an address such as {schemes[-1]}://host/..."
    try:
        parts = urlsplit(url)
        if parts.scheme not in schemes or ("http" in schemes and not parts.hostname):
            return [wrong]
        if "http" in schemes:
            _ = parts.port  # a list of hosts, as PostgreSQL takes it, has none
    except ValueError as error:
        return [f"{wrong}: {error}"]
    return []


def limit_problems(timeout: float, connections: int = 1) -> list[str]:
    if timeout > 0 and connections > 0:
        return []
    return ["timeout and destination.connections must be above 0"]


def name_problems(check: Callable[..., object], word: str, *name: str) -> list[str]:
    try:
        check(*name)
    except InvalidRequest as error:
        return [f"{word}: {error}"]
    return []


def character_problems(**names: str) -> list[str]:
    """Refuse control characters in names: people cannot see them, and servers refuse NUL."""
    return [
        f"{word} contains a control character: {name[:80]!r}"
        for word, name in names.items()
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in name)
    ]
