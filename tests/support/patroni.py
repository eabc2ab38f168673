"""A PostgreSQL cluster as people run it: Patroni moves the primary, etcd says who it is.

All from the system's packages (Debian: `patroni`, `etcd-server`, `postgresql`). PostgreSQL does not
run as root, so the tests that use this are run by root, as the system's user `postgres`.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.support import guard, leftovers
from tests.support.ports import free_port
from tests.support.wait import until

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
INSTALLED = bool(PROGRAMS and shutil.which("patroni") and shutil.which("etcd"))
NEEDED = "Patroni, etcd and PostgreSQL (Debian: patroni etcd-server postgresql)"
USER = "postgres"
TTL_SECONDS, LOOP_SECONDS, RETRY_SECONDS = 20, 1, 3  # the shortest that Patroni takes
ENV = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}  # its Python is the system's


def _environment() -> dict[str, str]:
    """With what tells the run and the test that a process belongs to."""
    names = (leftovers.RUN, "PYTEST_CURRENT_TEST")
    return ENV | {name: os.environ[name] for name in names if name in os.environ}


class Process:
    """A program of the system's packages, run by the user `postgres`."""

    def __init__(self, directory: Path, *command: str) -> None:
        self.directory, self._command = directory, command
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=_environment(), cwd=self.directory, user=USER,
                group=pwd.getpwnam(USER).pw_gid, extra_groups=[], start_new_session=True,
            )  # fmt: skip
        guard.watch(self.process.pid)

    def all(self) -> list[psutil.Process]:
        if self.process is None or not psutil.pid_exists(self.process.pid):
            return []
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def signal(self, number: int) -> None:
        for process in self.all():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue  # it ended meanwhile

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(30)


class Node(Process):
    """A Patroni and its PostgreSQL."""

    def __init__(self, directory: Path, name: str, etcd: str) -> None:
        directory.mkdir()
        self.name, self.port, self.api = name, free_port(), free_port()
        self.data = directory / "data"
        (directory / "patroni.yml").write_text(yaml.safe_dump(self._settings(directory, etcd)))
        super().__init__(directory, "patroni", str(directory / "patroni.yml"))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def all(self) -> list[psutil.Process]:
        """The postmaster is no child of Patroni."""
        result = super().all()
        pid = self._postmaster()
        if pid is not None and psutil.pid_exists(pid):
            server = psutil.Process(pid)
            result += [server, *server.children(recursive=True)]
        return result

    def _postmaster(self) -> int | None:
        try:
            return int((self.data / "postmaster.pid").read_text().split("\n", 1)[0])
        except (OSError, ValueError):
            return None

    def _settings(self, directory: Path, etcd: str) -> dict[str, Any]:
        access = ["local all all trust", "host all all 127.0.0.1/32 trust",
                  "host replication all 127.0.0.1/32 trust"]  # fmt: skip
        return {
            "scope": "penstock",
            "name": self.name,
            "etcd3": {"host": etcd},
            "restapi": {
                "listen": f"127.0.0.1:{self.api}", "connect_address": f"127.0.0.1:{self.api}",
            },
            "bootstrap": {
                "dcs": {
                    "ttl": TTL_SECONDS,
                    "loop_wait": LOOP_SECONDS,
                    "retry_timeout": RETRY_SECONDS,
                    "synchronous_mode": True,
                    "postgresql": {
                        "use_pg_rewind": True,
                        "parameters": {"max_connections": 100, "shared_buffers": "32MB"},
                    },
                },
                "initdb": [{"encoding": "UTF8"}, "data-checksums"],
            },
            "postgresql": {
                "listen": self.address,
                "connect_address": self.address,
                "data_dir": str(self.data),
                "bin_dir": str(PROGRAMS[0]),
                "pg_hba": access,
                "authentication": {
                    "superuser": {"username": "postgres", "password": "none"},
                    "replication": {"username": "replicator", "password": "none"},
                },
                "parameters": {"unix_socket_directories": str(directory), "fsync": "off"},
                "remove_data_directory_on_rewind_failure": True,
                "remove_data_directory_on_diverged_timelines": True,
            },
        }  # fmt: skip


class Cluster:
    """One etcd and two nodes, the second a synchronous standby of the first."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-patroni-"))
        self.directory.chmod(0o755)
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        (self.directory / "etcd").mkdir()
        self.etcd = Process(
            self.directory / "etcd", "etcd", "--name", "one", "--data-dir", "data",
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"one={peer}", "--unsafe-no-fsync",
        )  # fmt: skip
        etcd = client.removeprefix("http://")
        self.nodes = [Node(self.directory / name, name, etcd) for name in ("one", "two")]
        owner = pwd.getpwnam(USER)
        for path in (self.directory, *self.directory.rglob("*")):
            os.chown(path, owner.pw_uid, owner.pw_gid)

    @property
    def url(self) -> str:
        hosts = ",".join(node.address for node in self.nodes)
        return f"postgresql://postgres@{hosts}/postgres?sslmode=disable"

    def create(self) -> None:
        self.etcd.start()
        for node in self.nodes:
            node.start()
        self.wait()

    def leader(self) -> Node | None:
        for node in self.nodes:
            try:
                if httpx.get(f"http://127.0.0.1:{node.api}/primary", timeout=2).status_code == 200:
                    return node
            except httpx.HTTPError:
                continue
        return None

    def wait(self) -> Node:
        """Until there is a leader and a synchronous standby; the leader."""
        until(lambda: self._synchronous() and self.leader(), 180, "a leader and its standby")
        leader = self.leader()
        assert leader is not None
        return leader

    def other(self, node: Node) -> Node:
        return self.nodes[1 - self.nodes.index(node)]

    def switch_over(self, leader: Node) -> None:
        body = {"leader": leader.name, "candidate": self.other(leader).name}
        url = f"http://127.0.0.1:{leader.api}/switchover"
        answer = httpx.post(url, json=body, timeout=120)
        assert answer.status_code == 200, answer.text

    def _synchronous(self) -> bool:
        for node in self.nodes:
            try:
                url = f"http://127.0.0.1:{node.api}/synchronous"
                if httpx.get(url, timeout=2).status_code == 200:
                    return True
            except httpx.HTTPError:
                continue
        return False

    def remove(self) -> None:
        for process in (*self.nodes, self.etcd):
            process.signal(signal.SIGCONT)
            process.kill()
        shutil.rmtree(self.directory, ignore_errors=True)
