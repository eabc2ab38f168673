"""Check that every listen address is free before anything starts, and report clear errors."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from penstock.config import Config
from penstock.config.schema import ListenerSettings as Settings
from penstock.errors import PenstockError

FLAGS = {
    "http_server": "--http-port",
    "tcp_server": "--tcp-port",
    "kafka_server": "--kafka-port",
    "websocket_server": "--ws-port",
}
TITLES = {
    "http_server": "HTTP",
    "tcp_server": "TCP",
    "kafka_server": "Kafka",
    "websocket_server": "WebSocket",
}
PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)  # the address is valid, the port is not available


class AddressUnavailable(PenstockError):
    """An address cannot be listened on."""


@contextmanager
def listening(section: str, settings: Settings) -> Iterator[None]:
    """Open a listener; a failure names the address and the setting that changes it."""
    try:
        yield
    except (OSError, OverflowError) as error:
        key = "port" if isinstance(error, OverflowError) or error.errno in PORT_ERRORS else "host"
        variable = f"PENSTOCK_{section}_{key}".upper()
        flag = FLAGS[section] if key == "port" else f"--set {section}.host=..."
        raise AddressUnavailable(
            f"{TITLES[section]} cannot listen on {settings.host}:{settings.port}: {_reason(error)}."
            f" Another {key} is set by {flag}, by {variable}, or by {section}.{key} in the"
            " configuration file"
        ) from error


def _reason(error: OSError | OverflowError) -> str:
    if isinstance(error, socket.gaierror):
        return f"no such host ({error.strerror})"
    if isinstance(error, OverflowError):
        return "ports end at 65535"
    if error.errno == errno.EADDRINUSE:
        return "another program listens there (address already in use)"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine has no such address"
    if error.errno == errno.EACCES:
        return "the system does not allow it (ports below 1024 are for root)"
    return (error.strerror or os.strerror(error.errno)) if error.errno else str(error)


def check_addresses(config: Config) -> None:
    """Raise `AddressUnavailable` if a listener of this configuration cannot be opened now.

    The check does not use SO_REUSEPORT, which the processes of one broker use: two brokers on one
    port would each get half of the connections.
    """
    with ExitStack() as opened:
        for section in TITLES if config.topics.enabled else ("http_server",):
            settings: Settings = getattr(config, section)
            if not settings.enabled:
                continue
            with listening(section, settings):
                if settings.port > 65535:  # the resolver would use the port modulo 65536
                    raise OverflowError
                _open(settings, opened)


def _open(settings: Settings, opened: ExitStack) -> None:
    """Listen on every address of the host; skip addresses that this machine does not have.

    Raise if none is left.
    """
    addresses = socket.getaddrinfo(
        settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    missing: list[OSError] = []
    for family, _, _, _, address in addresses:
        try:
            one = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
            one.listen(1)  # two sockets of this user could both bind the port
        except OSError as error:
            if error.errno in PORT_ERRORS:
                raise
            missing.append(error)
    if missing and len(missing) == len(addresses):
        raise missing[0]
