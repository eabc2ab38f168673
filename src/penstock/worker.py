"""What `penstock worker` does: run the consumers of a module in several processes.

One process supervises and runs no code of the user's. The others import the module and run its
client; one that dies is started again, after longer and longer pauses while it keeps dying. SIGTERM
and Ctrl-C are passed on as SIGTERM, on which a client finishes what it handles; what takes longer
than the drain time is released. A second signal kills. When the supervising process is killed, the
others stop as on SIGTERM. With `--reload` the processes are started again when a Python file below
the directory changes.

Exit codes: 0 stopped as asked, 1 not everything in progress was finished, 2 there is nothing to
run.
"""

import argparse
import asyncio
import importlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import FrameType

from penstock.client import Client, SyncClient, queues
from penstock.client.sync import consumers_of
from penstock.errors import InvalidRequest, PenstockError
from penstock.io.parent import watch_parent
from penstock.net.retry import Backoff

log = logging.getLogger("penstock.worker")

STOPPED, FORCED, USAGE = 0, 1, 2  # exit codes
DRAIN_SECONDS = 60.0
RELEASE_SECONDS = 10.0  # after the drain time, to release what was not finished
POLL_SECONDS = 0.2
RELOAD_POLL_SECONDS = 1.0
STEADY_SECONDS = 30.0  # a process that lived so long was well: its next start is at once
CHILD = "PENSTOCK_WORKER_CHILD"  # in the environment of a process that runs consumers
IGNORED = frozenset({"__pycache__", "node_modules", "site-packages"})


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run, and how."""

    target: str
    processes: int
    reload: bool
    directory: Path
    drain_seconds: float
    log_level: str


def main(words: Sequence[str]) -> int:
    """`penstock worker` where the command line is not installed; the exit code."""
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
    """Supervise, or in a process that is supervised consume; the exit code."""
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if os.environ.get(CHILD):
        # Python matches bytecode by size and second: a file saved twice within one would be missed
        sys.dont_write_bytecode = sys.dont_write_bytecode or settings.reload
        return _consume(settings)
    return Supervisor(settings).run()


def _consume(settings: Settings) -> int:
    """Import the module and run its client to the end; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the supervisor, too
    watch_parent(_stop_alone)
    sys.path.insert(0, str(settings.directory.resolve()))
    try:
        client = client_of(settings.target)
    except PenstockError as error:
        sys.stderr.write(f"penstock: {error}\n")
        return USAGE
    try:
        if isinstance(client, Client):
            asyncio.run(_run(client, settings.drain_seconds))
        else:
            with client:
                client.run(drain_seconds=settings.drain_seconds)
    except PenstockError as error:
        log.error("the consumers ended: %s", error)
        return FORCED
    if released := sum(consumer.released for consumer in consumers_of(client)):
        log.warning("%d messages did not finish in time: they are released", released)
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


def client_of(target: str) -> Client | SyncClient:
    """The client that `module:name` names, with its consumers."""
    module_name, colon, name = target.partition(":")
    if not colon or not name:
        raise InvalidRequest(f"{target!r} names no client: write module:client")
    queues.watched_pushes = set()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # of the user's own imports: the traceback says where
        raise InvalidRequest(
            f"there is no module {error.name!r} here: run this where it is, or say --directory"
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
        # the same command once more: the environment makes it the one that works
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *sys.argv[1:]],
            env={**os.environ, CHILD: "1"},
            stdin=subprocess.PIPE,  # it ends with us, which the process notices
        )

    def look(self) -> int | None:
        """Start it again when it has died and its pause is over; its exit code when it says that
        there is nothing to run.
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
        """Its exit code, after it has ended; the next start is at once."""
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
        self._signals = 0  # that asked us to stop

    def run(self) -> int:
        """Supervise until a signal; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        changed = Changes(self._settings.directory) if self._settings.reload else None
        while not self._signals:
            codes = [process.look() for process in self._processes]
            if USAGE in codes and not self._settings.reload:  # with reload the file may be mended
                self._stop()
                return USAGE
            if changed is not None and changed.look():
                log.info("a file has changed: the consumers start again")
                self._stop()
            time.sleep(POLL_SECONDS)
        return self._stop()

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        del frame
        self._signals += 1

    def _stop(self) -> int:
        """Have the processes finish what they handle, and kill those that do not."""
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
    """Whether a Python file below a directory has changed since the last look."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._looked = time.monotonic()
        self._files = dict(self._scan())

    def look(self) -> bool:
        if time.monotonic() - self._looked < RELOAD_POLL_SECONDS:
            return False
        before, self._files = self._files, dict(self._scan())
        self._looked = time.monotonic()
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
                        continue  # removed in between: a change by its absence
