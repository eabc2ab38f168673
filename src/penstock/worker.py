"""`penstock worker`: run the consumers of a module in several processes.

One process supervises and does not import the user's code. The others import the module and run its
client. A process that dies is started again, after longer and longer pauses while it keeps dying.
SIGTERM and Ctrl-C are passed on as SIGTERM: a client then finishes the messages in progress, and
releases those that take longer than the drain time. A second signal kills. When the supervising
process is killed, the others stop as on SIGTERM. With `--reload` the processes are started again
when a Python file below the directory changes.

A process whose handler ignores its `timeout` is replaced. A thread that hangs cannot be stopped:
its attempt fails, the process finishes its other messages and ends. A handler that blocks the event
loop stops the whole process, so the process exits with the traceback of every thread, and the
broker counts the attempts when the leases expire.

Exit codes: 0 stopped as requested, 1 not all messages in progress were finished, 2 nothing to run.
"""

import argparse
import asyncio
import faulthandler
import importlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import FrameType

from penstock.client import Client, SyncClient, queues
from penstock.client.sync import consumers_of
from penstock.errors import Forbidden, InvalidRequest, PenstockError, Unauthorized
from penstock.io.parent import watch_parent
from penstock.io.tasks import cancelled
from penstock.net.retry import Backoff

log = logging.getLogger("penstock.worker")

STOPPED, FORCED, USAGE = 0, 1, 2  # exit codes
DRAIN_SECONDS = 60.0
RELEASE_SECONDS = 10.0  # after the drain time, to release unfinished messages
POLL_SECONDS = 0.2
RELOAD_POLL_SECONDS = 1.0
LOOP_SECONDS = 0.5  # between two signs of life of the event loop
STEADY_SECONDS = 30.0  # after a process has run for so long, the pauses are short again
CHILD = "PENSTOCK_WORKER_CHILD"  # in the environment of a process that runs consumers
IGNORED = frozenset({"__pycache__", "node_modules", "site-packages"})


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of the command."""

    target: str
    processes: int
    reload: bool
    directory: Path
    drain_seconds: float
    log_level: str


def main(words: Sequence[str]) -> int:
    """Run `penstock worker` where the command line is not installed. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "penstock worker", description="Run the consumers of a Python module."
    )
    parser.add_argument("target", help="module:client, such as shop.consumers:client")
    parser.add_argument("-p", "--processes", type=int, default=1)
    parser.add_argument("--reload", action="store_true")
    parser.add_argument("-d", "--directory", type=Path, default=Path())
    parser.add_argument("--drain-seconds", type=float, default=DRAIN_SECONDS)
    parser.add_argument("--log-level", default="info")
    return run(Settings(**vars(parser.parse_args(words))))


def run(settings: Settings) -> int:
    """Supervise, or consume in a process that is supervised. Returns the exit code."""
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if os.environ.get(CHILD):
        # Python matches bytecode by size and second: a file saved twice within one would be missed
        sys.dont_write_bytecode = sys.dont_write_bytecode or settings.reload
        return _consume(settings)
    return Supervisor(settings).run()


def _consume(settings: Settings) -> int:
    """Import the module and run its client until it stops. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the supervisor, too
    watch_parent(_stop_alone)
    sys.path.insert(0, str(settings.directory.resolve()))
    try:
        client = client_of(settings.target)
    except PenstockError as error:
        sys.stderr.write(f"penstock: {error}\n")
        return USAGE
    consumers = consumers_of(client)
    for consumer in consumers:
        consumer.on_hang = _replace_process
    if limits := [consumer.timeout for consumer in consumers if consumer.timeout is not None]:
        client.lifespan(partial(_loop_watched, max(limits)))
    try:
        if isinstance(client, Client):
            asyncio.run(_run(client, settings.drain_seconds))
        else:
            with client:
                client.run(drain_seconds=settings.drain_seconds)
    except PenstockError as error:
        refused = isinstance(error, Unauthorized | Forbidden)
        hint = " (PENSTOCK_TOKEN, or Client(token=...))" if refused else ""
        log.error("the consumers ended: %s%s", error, hint)
        return FORCED
    if released := sum(consumer.released for consumer in consumers):
        log.warning("%d messages did not finish in time and were released", released)
    if released or any(consumer.hanging for consumer in consumers):
        logging.shutdown()
        sys.stdout.flush()
        os._exit(FORCED)  # a handler in a thread would keep the process
    return STOPPED


async def _run(client: Client, drain_seconds: float) -> None:
    async with client:
        await client.run(drain_seconds=drain_seconds)


def _stop_alone() -> None:
    log.warning("the supervising process has ended: the consumers stop")
    os.kill(os.getpid(), signal.SIGTERM)


def _replace_process() -> None:
    log.error("this process finishes its other messages and is replaced")
    os.kill(os.getpid(), signal.SIGTERM)


async def _loop_watched(seconds: float) -> AsyncIterator[None]:
    """Exit when the event loop is blocked for longer than the longest timeout of a consumer.

    faulthandler's timer needs neither the loop nor the GIL.
    """

    async def show_life() -> None:
        while True:
            faulthandler.dump_traceback_later(seconds + LOOP_SECONDS, exit=True)
            await asyncio.sleep(LOOP_SECONDS)

    showing = asyncio.create_task(show_life())
    try:
        yield
    finally:
        await cancelled(showing)
        faulthandler.cancel_dump_traceback_later()


def client_of(target: str) -> Client | SyncClient:
    """Import the client that `module:name` names, with its consumers."""
    module_name, colon, name = target.partition(":")
    if not colon or not name:
        raise InvalidRequest(f"{target!r} does not name a client: write module:client")
    queues.watched_pushes = set()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # an import in the user's module failed: the traceback shows where
        raise InvalidRequest(
            f"module {error.name!r} was not found: run this in its directory, or pass --directory"
        ) from None
    finally:
        pushed, queues.watched_pushes = queues.watched_pushes, None
    if pushed:
        log.warning(
            "importing %s pushed to %s, and every process of this worker does so when it starts. "
            "Push in a function, or in a module of its own",
            module_name,
            ", ".join(sorted(pushed)),
        )
    client = getattr(module, name, None)
    if client is None:
        near = get_close_matches(name, vars(module), 1, 0.6)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidRequest(f"module {module_name!r} has no attribute {name!r}{hint}")
    if not isinstance(client, Client | SyncClient):
        kind = type(client).__name__
        raise InvalidRequest(f"{target} is a {kind}, not a penstock.Client or SyncClient")
    if not consumers_of(client):
        raise InvalidRequest(f"{target} has no consumers: decorate functions with @{name}.consumer")
    return client


class Process:
    """A process that runs the consumers, started again when it dies."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._backoff = Backoff(0.5, 30.0)
        self._started = 0.0
        self._due = 0.0  # when it may be started again
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._started = time.monotonic()
        # the same command: the variable in its environment makes it consume
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *sys.argv[1:]],
            env={**os.environ, CHILD: "1"},
            stdin=subprocess.PIPE,  # closed when this process ends, which the child notices
        )

    def keep_running(self) -> int | None:
        """Start the process again if it has died and its pause is over. Returns `USAGE` if it
        ended because there is nothing to run.
        """
        if self._process is None:
            if time.monotonic() >= self._due:
                self.start()
            return None
        code = self._process.poll()
        if code is None:
            return None
        self.forget()
        if code == USAGE:
            return code
        if time.monotonic() - self._started >= STEADY_SECONDS:
            self._backoff.reset()
        pause = self._backoff.delay()
        self._due = time.monotonic() + pause
        log.warning(
            "process %d ended with %d; it is started again in %.1f s", self.number, code, pause
        )
        return None

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def forget(self) -> int:
        """Wait for the end of the process and return its exit code. The next start is immediate."""
        process, self._process, self._due = self._process, None, 0.0
        if process is None:
            return STOPPED
        assert process.stdin is not None
        process.stdin.close()
        return process.wait()


class Supervisor:
    """Starts the processes, keeps them running, and ends them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._processes = [Process(number) for number in range(settings.processes)]
        self._signals = 0  # received: the first one stops, a second one kills

    def run(self) -> int:
        """Supervise until a signal arrives. Returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        changes = Changes(self._settings.directory) if self._settings.reload else None
        while not self._signals:
            codes = [process.keep_running() for process in self._processes]
            if (
                USAGE in codes and not self._settings.reload
            ):  # with --reload the file may be corrected
                self._stop()
                return USAGE
            if changes is not None and changes.happened():
                log.info("a file has changed: the consumers start again")
                self._stop()
            time.sleep(POLL_SECONDS)
        return self._stop()

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        del frame
        self._signals += 1

    def _stop(self) -> int:
        """Let the processes finish their messages, and kill those that do not end in time."""
        before = self._signals
        for process in self._processes:
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._settings.drain_seconds + RELEASE_SECONDS
        while any(process.alive for process in self._processes):
            if time.monotonic() > deadline or self._signals > max(before, 1):
                log.warning("the consumers did not finish: they are killed")
                for process in self._processes:
                    process.signal(signal.SIGKILL)
                return FORCED
            time.sleep(POLL_SECONDS / 4)
        codes = [process.forget() for process in self._processes]
        return FORCED if FORCED in codes else STOPPED


class Changes:
    """Watches the Python files below a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._checked_at = time.monotonic()
        self._files = dict(self._scan())

    def happened(self) -> bool:
        """Return whether a file has changed since the last call that checked."""
        if time.monotonic() - self._checked_at < RELOAD_POLL_SECONDS:
            return False
        before, self._files = self._files, dict(self._scan())
        self._checked_at = time.monotonic()
        return before != self._files

    def _scan(self) -> Iterator[tuple[str, int]]:
        for folder, folders, files in os.walk(self._directory):
            folders[:] = [one for one in folders if one not in IGNORED and not one.startswith(".")]
            for name in files:
                if name.endswith(".py"):
                    path = Path(folder, name)
                    try:
                        yield str(path), path.stat().st_mtime_ns
                    except FileNotFoundError:
                        continue  # removed meanwhile, which is a change as well
