"""Nothing outlives a test run, however it ends: a process of its own kills what the run had started
and left behind.

The guard reads from a pipe whose other end only this process has (children do not inherit it), so
the pipe's end tells that this process is gone, also after kill -9. A signal at the parent's death
(PR_SET_PDEATHSIG) would come when the thread that started a child ends, and tests start brokers
from threads.
"""

import atexit
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import psutil

from penstock.database.embedded import EmbeddedPostgres
from tests.support import leftovers

_lock = threading.Lock()
_guard: "subprocess.Popen[str] | None" = None


def watch(pid: int) -> None:
    """Kill this process and all that came from it when the test run is gone."""
    try:
        _tell(f"{pid} {psutil.Process(pid).create_time()!r}")
    except psutil.NoSuchProcess:
        return


def watch_postgres(directory: Path) -> None:
    """The same for the PostgreSQL that runs in this directory by then; it is no child of ours."""
    _tell(f"postgres {directory.absolute()}")


def watch_run(directory: Path) -> None:
    """Kill everything of the run with this directory, and remove the directory, when it is gone."""
    _tell(f"run {directory}")


def _tell(line: str) -> None:
    global _guard
    with _lock:
        if _guard is None or _guard.poll() is not None:
            command = [sys.executable, "-m", "tests.support.guard"]
            root = Path(__file__).parents[2]
            _guard = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                text=True,
                start_new_session=True,
                cwd=root,
                env={name: value for name, value in os.environ.items() if name != leftovers.RUN},
            )
            atexit.register(_guard.wait)
            atexit.register(_guard.stdin.close)  # type: ignore[union-attr]  # runs first
        assert _guard.stdin is not None
        _guard.stdin.write(line + "\n")
        _guard.stdin.flush()


def _kill(pid: int, born: float) -> None:
    try:
        process = psutil.Process(pid)
        if process.create_time() != born:
            return  # another one that has its number now
        doomed = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    kill_each(doomed)


def kill_each(processes: list[psutil.Process]) -> None:
    """Kill processes of which some may have ended meanwhile."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def main() -> None:
    watched = [line.partition(" ") for line in sys.stdin.read().splitlines()]
    for word, _, born in watched:
        if word not in ("postgres", "run"):
            _kill(int(word), float(born))
    for word, _, directory in watched:  # after the brokers, which would start it again
        if word == "postgres":
            EmbeddedPostgres(Path(directory)).stop("immediate")
    for word, _, directory in watched:
        if word == "run":
            leftovers.kill_processes(Path(directory))
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
