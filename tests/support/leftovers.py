"""What a test run leaves behind on the machine: processes, and files outside its own directory.

Each run has a directory for all its temporary files, removed at its end. The directory's path is in
the environment of the run (`RUN`) and of every process that the run starts, so runs that share a
machine do not see each other's processes. pytest puts the current test into the environment as
well, which names the test that started a process.

Files outside this directory have no such mark. They are reported if they appeared during the run,
are named like something that the tests start, stay, and are not used by a process outside of the
run. They are not reported when another pytest was active, which may have made them.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from penstock.config import cluster_link

RUN = "TEST_RUN_DIRECTORY"
PREFIX = "penstock-run-"
PLACES = (Path("/dev/shm"), Path("/tmp"), Path("/var/tmp"))
OURS = re.compile(r"penstock|PostgreSQL\.|spark-|blockmgr-|playwright|azurite|pgbouncer")
SEGMENT = "PostgreSQL."  # in /dev/shm
GRACE_SECONDS = 20.0  # for processes that are ending
LOOK_SECONDS = 2.0
# They end with the process that runs the tests, when that is not a worker of pytest-xdist.
END_WITH_US = re.compile(r"pyspark-shell|multiprocessing\.(resource_tracker|forkserver)")


class Run:
    """A test run and its directory; made by the process that the user has started."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.directory.chmod(0o711)  # the embedded PostgreSQL under root is another user's
        os.environ[RUN] = str(self.directory)
        self._before = set(_outside())
        self._alone = True
        self._next_look = 0.0
        self.look()

    def look(self) -> None:
        """Note whether somebody else runs tests now. Called often, so it looks rarely."""
        if self._alone and time.monotonic() >= self._next_look:
            self._alone = not _others_run_pytest(self.directory)
            self._next_look = time.monotonic() + LOOK_SECONDS

    def leftovers(self) -> list[str]:
        """Describe everything that is left, at the end of the run."""
        return [*self._processes(), *self._clusters(), *self._files()]

    def _processes(self) -> Iterator[str]:
        deadline = time.monotonic() + GRACE_SECONDS
        while (running := _started_by(self.directory)) and time.monotonic() < deadline:
            psutil.wait_procs(running, timeout=0.2)
        for process in running:
            command = _command(process)
            yield f"process {process.pid} of {_test_of(process)}: {command[:200]}"

    def _clusters(self) -> Iterator[str]:
        checkout = Path(__file__).parents[2]
        for owner in cluster_link.OUTSIDE.glob(f"*/{cluster_link.OWNER}"):
            link = Path(owner.read_text().strip().partition(" ")[2])
            if link.is_relative_to(self.directory) or link.is_relative_to(checkout):
                yield f"database {owner.parent} of {link}"

    def _files(self) -> Iterator[str]:
        self._next_look = 0.0
        self.look()
        deadline = time.monotonic() + GRACE_SECONDS
        if self._alone:
            self._remove_segments()
        while self._alone and (left := self._new_files()):
            if time.monotonic() > deadline:
                yield from (f"file {path}" for path in left)
                return
            time.sleep(0.5)
            self.look()

    def _remove_segments(self) -> None:
        """Remove the shared memory of PostgreSQL servers that tests killed. A server removes it when
        it starts again after that; the directories of these are gone.
        """
        mapped = _mapped_segments()
        for path in set(_outside()) - self._before:
            if path.name.startswith(SEGMENT) and path.name not in mapped:
                path.unlink(missing_ok=True)

    def _new_files(self) -> list[Path]:
        new = sorted(set(_outside()) - self._before)
        return [path for path in new if not _used_by_others(path)]


def temporary_directory(directory: Path) -> Path:
    """Make and use the part of the run's directory that belongs to this process."""
    own = directory / os.environ.get("PYTEST_XDIST_WORKER", "main")
    own.mkdir(mode=0o711, exist_ok=True)
    own.chmod(0o711)
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)
    return own


def kill_processes(directory: Path) -> None:
    """Kill what a run has started and not stopped."""
    for process in _started_by(directory):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _started_by(directory: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN) != str(directory) or process.pid == os.getpid():
                continue
            if process.status() == psutil.STATUS_ZOMBIE or END_WITH_US.search(_command(process)):
                continue
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # ended, or another user's
            continue
        found.append(process)
    return found


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "(ended)"


def note_test() -> None:
    """Remember the test that started this process, which was forked: others see the environment
    of the process that it comes from.
    """
    if RUN in os.environ:
        _note(os.getpid()).write_text(os.environ.get("PYTEST_CURRENT_TEST", "no test"))


def _note(process: int) -> Path:
    return Path(os.environ[RUN]) / f"test-of-{process}"


def _test_of(process: psutil.Process) -> str:
    try:
        name = process.environ().get("PYTEST_CURRENT_TEST", "no test")
    except psutil.NoSuchProcess:
        return "a test"
    note = _note(process.pid)
    return (note.read_text() if note.exists() else name).partition(" (")[0]


def _mapped_segments() -> set[str]:
    """Return the names of the segments that a running process uses."""
    names = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:  # the process has ended
            continue
        names.update(re.findall(r"/dev/shm/(PostgreSQL\.\d+)", text))
    return names


def _outside() -> Iterator[Path]:
    for place in PLACES:
        if place.is_dir():
            for path in place.iterdir():
                if OURS.match(path.name) and not path.name.startswith(PREFIX):
                    yield path


def _others_run_pytest(directory: Path) -> bool:
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        try:
            if "pytest" not in _command(process) or process.pid in own:
                continue
            within = process.environ().get("TMPDIR", "")  # a pytest that one of our tests runs
            if not Path(within).is_relative_to(directory):
                return True
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            return True
    return False


def _used_by_others(path: Path) -> bool:
    for process in psutil.process_iter():
        try:
            words = (_command(process), process.cwd(), *(m.path for m in process.memory_maps()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(str(path) in word for word in words):
            return True
    return False
