"""Run the owner process of a broker, from its first log line to its exit code.

Exit codes: 0 stopped as requested, 1 an unexpected failure, 2 wrong usage or configuration, 3 the
data directory is in use, 4 the embedded database cannot be started, 5 an address is not available,
130 stopped immediately by a second signal.
"""

import asyncio
import errno
import json
import logging
import os
import pwd
import signal
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from penstock import __version__
from penstock.broker import Broker
from penstock.config import Loaded, load
from penstock.config.load import default_file
from penstock.errors import ConfigError, Locked, PenstockError, Unavailable
from penstock.io.fs import raise_file_limit
from penstock.logging import set_up
from penstock.metrics import Metrics
from penstock.server import systemd
from penstock.server.workers import WorkerProcesses
from penstock.wire.addresses import AddressUnavailable, check_addresses
from penstock.wire.auth import verifier_of
from penstock.wire.listeners import Listeners
from penstock.wire.origins import Origins
from penstock.wire.tls import Certificates

log = logging.getLogger("penstock.broker")

FEW_FILES = 4096
USAGE, INTERRUPTED = 2, 130
EXIT_CODES = {ConfigError: USAGE, Locked: 3, Unavailable: 4, AddressUnavailable: 5}


def main(order: str) -> int:
    """Serve with the options that `penstock serve` has read, and return the exit code."""
    config, flags = json.loads(order)
    try:
        loaded = load(Path(config) if config else default_file(), flags=flags)
    except ConfigError as error:
        sys.stderr.write(f"penstock: the configuration is wrong:\n{error}\n")
        return USAGE
    return run(loaded)


def run(loaded: Loaded) -> int:
    """Serve until a signal arrives, and return the exit code."""
    config = loaded.config
    set_up(config.log_level, config.log_format)
    for warning in loaded.warnings:
        log.warning("%s", warning)
    if 0 < (files := raise_file_limit()) < FEW_FILES:
        log.warning(
            "this process may open only %d files, and every connection needs one. Raise the hard "
            "limit (ulimit -Hn; LimitNOFILE= of systemd)",
            files,
        )
    try:
        uvloop.run(_serve(loaded))
    except (PenstockError, OSError) as error:
        log.error("%s", error)
        return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
    return 0


def check_data_directory(directory: Path) -> None:
    """Create the data directory, and refuse one that cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return  # parts that need space report it, and the others work
        user = pwd.getpwuid(os.geteuid()).pw_name
        place = directory.absolute()
        raise ConfigError(
            f"the user {user} cannot write to the data directory {place} ({error.strerror}): "
            f"create it for this user (sudo install -d -o {user} {place}), or name another one "
            "with --data-dir, PENSTOCK_DATA_DIRECTORY or data_directory"
        ) from None


async def _serve(loaded: Loaded) -> None:
    config = loaded.config
    check_data_directory(config.data_directory)
    began = time.monotonic()
    stop = _on_signals()
    log.info("penstock %s starting: data in %s", __version__, config.data_directory.absolute())
    # Report unusable settings before anything starts.
    verifier_of(config.auth, Metrics())
    Certificates(config)
    Origins(config.http_server.cors_origin, config.http_server.hosts)
    broker = Broker(config, origins=loaded.origins)
    await broker.start(check=lambda: check_addresses(config))
    listeners = Listeners(broker)
    workers = WorkerProcesses(config, broker, listeners)
    delay = 0.0
    watchdog = systemd.Watchdog()
    broker.starting = True
    try:
        await listeners.start()
        await workers.start()
        broker.starting = False
        # SIGHUP reloads certificates. Without any, it ends a process whose terminal was closed; a
        # process under a service manager has no terminal.
        if listeners.certificates.all or systemd.is_manager():

            def renew() -> None:
                listeners.certificates.reload()
                workers.renew()

            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, renew)
        log.info("ready in %.1f s", time.monotonic() - began)
        _welcome(broker, listeners.addresses)
        systemd.notify("READY=1")
        watchdog.start()
        await stop.wait()
        delay = config.shutdown_delay
        systemd.notify("STOPPING=1")
        first = f"/health/ready answers 503 for {delay:g} s, then " if delay else ""
        log.info("stopping: %sopen requests have %g s to finish", first, config.shutdown_timeout)
    finally:
        stopping = time.monotonic()
        await listeners.stop(config.shutdown_timeout, delay, workers.stop())
        await broker.stop()
        watchdog.stop()
        log.info("stopped in %.1f s", time.monotonic() - stopping)


def _on_signals() -> asyncio.Event:
    """Return an event that SIGTERM or SIGINT sets; a second signal ends the process at once."""
    asked = asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            log.warning("stopped immediately by a second signal")
            os._exit(INTERRUPTED)
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return asked


def _welcome(broker: Broker, addresses: dict[str, str]) -> None:
    database = broker.database
    lines = [f"Penstock {__version__} is ready{'' if database.healthy else ', in part'}."]
    lines += [f"  {name:<10} {address}" for name, address in addresses.items()]
    lines.append(f"  {'data':<10} {broker.config.data_directory.absolute()}")
    if database.healthy:
        where = "embedded PostgreSQL" if database.embedded else f"PostgreSQL at {database.host}"
        lines.append(f"  {'database':<10} {where}")
        if outside := database.embedded and database.embedded.outside:
            lines.append(f"  {'':<10} in {outside}, NOT in the data directory: copy or move the")
            lines.append(f"  {'':<10} data with 'penstock backup' and 'penstock restore'.")
    else:
        topics = "Topics work. " if broker.logs else ""
        buffers = broker.config.buffer.enabled
        pushes = "wait in files until it answers" if buffers else "get 503"
        lines += [
            f"  {'database':<10} NOT AVAILABLE: {database.problem}",
            f"  {'':<10} {topics}Pushes to queues {pushes}; pops get 503.",
        ]
    http = addresses.get("HTTP")
    if http:
        items = '{"items":[{"queue":"hello","payload":{"to":"world"}}]}'
        lines += [
            "Try this in another terminal:",
            f"  curl -X POST {http}/api/v1/push -d '{items}'",
            f"  curl '{http}/api/v1/pop/queue/hello?autoAck=true'",
            f"and read {http}/docs",
        ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
