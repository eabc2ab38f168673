"""Notify a service manager: ready, stopping, and that the event loop still runs.

systemd gives a service with `Type=notify` the address of a datagram socket in NOTIFY_SOCKET and,
with `WatchdogSec=`, the interval in WATCHDOG_USEC. The protocol is one datagram per message
(sd_notify(3)), so we need no library for it. Without NOTIFY_SOCKET nothing is sent.
"""

import asyncio
import logging
import os
import socket

from penstock.io.tasks import repeated

log = logging.getLogger("penstock.server")


def is_manager() -> bool:
    """Return whether a service manager started this process and expects notifications."""
    return bool(os.environ.get("NOTIFY_SOCKET"))


def notify(message: str) -> None:
    """Send `READY=1` and the like. A manager that cannot be reached is only logged."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # the abstract namespace
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.setblocking(False)
            manager.connect(address)
            manager.send(message.encode())
    except OSError as error:
        log.warning("the service manager could not be notified of %s: %s", message, error)


class Watchdog:
    """Send WATCHDOG=1 from the event loop twice per interval. If the loop hangs, systemd restarts
    the process.
    """

    def __init__(self) -> None:
        self._interval = _interval()
        self._beating: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._interval:
            _beat()
            self._beating = repeated("watchdog of systemd", _beat, self._interval / 2)

    def stop(self) -> None:
        if self._beating:
            self._beating.cancel()


def _beat() -> None:
    notify("WATCHDOG=1")


def _interval() -> float:
    """Return the seconds within which systemd expects a sign of life; 0: it expects none."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0  # meant for a process that started us
    try:
        return int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
    except ValueError:
        return 0.0
