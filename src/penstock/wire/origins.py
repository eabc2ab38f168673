"""Decide which web pages may call the broker, and under which host names.

A broker on 127.0.0.1 is within reach of every web page that its user opens: browsers send simple
requests, WebSocket upgrades and plain GETs to any address. Two headers, which pages cannot change,
tell where a request comes from:

- `Origin`: scheme, host and port of the page. The broker's own pages match the `Host` header.
- `Sec-Fetch-Site`: the browser's own judgement (same-origin, same-site, cross-site; none: the user
  typed the address). It stays correct behind a proxy that changes `Host`, and is also sent with
  requests that have no `Origin`, such as images.

A request with neither does not come from a browser and passes. A page can point its own name at the
broker's address (DNS rebinding): its origin then matches, but `Host` has its name. So while tokens
are off, names that anyone can register in the public DNS are refused too. Names without a dot and
names below `PRIVATE_ENDINGS` cannot be registered there; container networks use them. An attacker
who controls the DNS of the local network can still assign them
(docs/decisions/wire-and-protocols.md).

The decision is made once per distinct request head.
"""

import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from penstock.errors import ConfigError

_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_HOST = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^:\[\]]*)(?::(\d{0,5}))?")
# reserved by RFC 6761 and ICANN, or used by Kubernetes; any device can answer for .local
PRIVATE_ENDINGS = (".localhost", ".internal", ".svc", ".cluster.local")
_LABEL = re.compile("[a-z0-9_-]{1,63}")  # a name without a dot
_MAX_REPORTED = 16

log = logging.getLogger("penstock.http")


class Origins:
    def __init__(
        self,
        allowed: str = "",
        hosts: str = "",
        bound: Iterable[str] = (),
        *,
        any_host: bool = False,
        ports: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """`allowed`: more origins, or *, separated by commas. `hosts`: more names of the broker.

        `bound`: the names it listens on. `any_host`: accept every name. `ports`: pages on these
        ports of the same host are allowed.
        """
        origins = [word.strip().lower().rstrip("/") for word in allowed.split(",") if word.strip()]
        for origin in origins:
            if origin != "*" and not _is_origin(origin):
                raise ConfigError(
                    f"http_server.cors_origin: {origin!r} is not an origin;"
                    " write it as https://console.example or http://localhost:3000"
                )
        self._everyone = "*" in origins
        self._allowed = frozenset(origins)
        names = [word.strip().lower().rstrip(".") for word in hosts.split(",") if word.strip()]
        for name in names:
            if "/" in name or (":" in name and not _is_address(name)):
                raise ConfigError(
                    f"http_server.hosts: {name!r} is not a host name; leave out scheme and port"
                )
        self._any_host = any_host or "*" in names
        own = socket.gethostname().lower().rstrip(".")
        self._names = {"localhost", own, own.split(".")[0], f"{own.split('.')[0]}.local", *names}
        self._names.update(name.lower().rstrip(".") for name in bound)
        self._names.discard("")
        self._endings = tuple(name[1:] for name in names if name.startswith("*."))
        self._ports = ports
        self._reported: set[str] = set()  # names that were refused

    def refusal(
        self, host: str | None, origin: str | None, site: str | None, *, is_link: bool = False
    ) -> str | None:
        """Return why a request with these headers is refused; None if it is allowed.

        `is_link`: the request follows a link to a page of the Console.
        """
        if host is not None and not self.has_host(host):
            self._report(host[:255])
            return (
                f"The host name {host[:255]!r} is not one of this broker's. While it asks for no"
                " tokens it answers to IP addresses, its own host name, names without a dot and"
                f" names below {', '.join(PRIVATE_ENDINGS)}; list further names in"
                " http_server.hosts"
            )
        if site == "same-origin":
            return None
        if origin is not None:
            if self.allows(origin) or self._is_ours(origin, host):
                return None
        elif site in (None, "none") or self._everyone or is_link:
            return None
        page = (
            f"from pages of {origin[:255]!r}" if origin is not None else "from pages of other sites"
        )
        return (
            f"Requests {page} are refused: only pages of this broker may send them."
            " List the page's origin in http_server.cors_origin to allow it"
        )

    def has_host(self, host: str) -> bool:
        """Return True if a Host header has an address, a private name, or a name of the broker."""
        name, _ = _host_and_port(host)
        is_private = _LABEL.fullmatch(name) is not None or name.endswith(PRIVATE_ENDINGS)
        is_ours = name in self._names or name.endswith(self._endings)
        return self._any_host or is_private or is_ours or _is_address(name)

    def _report(self, host: str) -> None:
        """Log a refused name once, so that an operator sees why a client or proxy fails."""
        if host not in self._reported and len(self._reported) < _MAX_REPORTED:
            self._reported.add(host)
            log.warning(
                "refused a request for the host name %r:"
                " list it in http_server.hosts if it belongs to this broker",
                host,
            )

    def allows(self, origin: str) -> bool:
        return self._everyone or origin.lower() in self._allowed

    def _is_ours(self, origin: str, host: str | None) -> bool:
        try:
            page = urlsplit(origin.lower())
            page_port = page.port or _PORTS[page.scheme]
        except (ValueError, KeyError):
            return False  # null, of an extension, or malformed
        name, port = _host_and_port(host or "")
        if not name or (page.hostname or "") != name:
            return False
        return page_port == (port or _PORTS[page.scheme]) or page_port in self._ports()


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 - raises if it is not a port
    except ValueError:
        return False
    return bool(parts.scheme and parts.hostname) and not (parts.path or parts.query)


def _host_and_port(host: str) -> tuple[str, int | None]:
    """Return the name in lower case without brackets and final dot; ("", None) if malformed."""
    match = _HOST.fullmatch(host.strip().lower())
    if match is None:
        return "", None
    return match[1].strip("[]").rstrip("."), int(match[2]) if match[2] else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
