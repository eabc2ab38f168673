"""Fixtures for pytest: a temporary broker, clients of it, and unique names.

    # conftest.py
    pytest_plugins = ["penstock.testing"]

    # test_orders.py
    def test_an_order_is_billed(penstock_client, penstock_name):
        queue = penstock_name("orders")
        penstock_client.push(queue, {"id": 7})
        ...

The broker is started once per session, on free ports, with an embedded PostgreSQL in a temporary
directory (`pip install 'penstock[server]'`). If PENSTOCK_TEST_URL is set, the broker at that URL is
used instead. If PENSTOCK_TEST_DATABASE_URL is set, the started broker uses that PostgreSQL.

A test that needs its own broker uses the fixture `penstock_broker`. Such brokers share one
PostgreSQL with a database each, and are forked from a process that has imported the program, so
they start in a fraction of a second (`penstock.server.forks`).
"""

import atexit
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self

import pytest

from penstock.client import SyncClient
from penstock.database.embedded import EmbeddedPostgres

START_SECONDS = 120.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.02


class ForkServer:
    """The process that forks brokers (`penstock.server.forks`). It ends with this process."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-test-"))
        self.directory.chmod(0o755)  # an embedded PostgreSQL under root is another user's
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.server.forks", str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._brokers = 0
        atexit.register(self.close)

    def next_number(self) -> int:
        self._brokers += 1
        return self._brokers

    def ask(self, order: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(order)}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that starts brokers has ended; its error is above")
        return json.loads(answer)

    def close(self) -> None:
        """Stop all brokers and PostgreSQL, and delete their files."""
        self._process.communicate()
        atexit.unregister(self.close)
        fork_server.cache_clear()


fork_server = cache(ForkServer)


class ForkedProcess:
    """A broker that was forked, with the methods of `subprocess.Popen` that we need."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid  # stays ours until `poll` has returned the exit code
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask(self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = STOP_SECONDS) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("penstock serve", timeout)
            time.sleep(POLL_SECONDS)
        return code


class ThrowawayBroker:
    """A broker in a process of its own, for tests: `with ThrowawayBroker() as broker`.

    It listens on free ports, and on the same ones when it is started again. With neither a
    directory nor a database of yours, it is forked and starts fast.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        database_url: str | None = None,
        env: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        """Prepare a broker that keeps its data in `data_dir`, by default a temporary directory.

        `settings` are configuration keys with two underscores for each dot, such as
        `topics__segment_bytes="1Mi"`; `env` is added to the environment.
        """
        self.database_url = database_url
        self._settings = [f"{name.replace('__', '.')}={value}" for name, value in settings.items()]
        self._env = dict(env or {})
        self._forks = fork_server() if data_dir is None and database_url is None else None
        self._number = self._forks.next_number() if self._forks else 0
        self._temporary: Path | None = None
        if self._forks is not None:
            data_dir = self._forks.directory / str(self._number)
        elif data_dir is None:
            self._temporary = data_dir = Path(tempfile.mkdtemp(prefix="penstock-test-"))
        self.data_dir = data_dir
        # Keep them open, so that the broker has the same ports when it is started again.
        self._reserved = {name: _reserve_port() for name in ("http", "tcp", "kafka", "ws")}
        self.ports = {name: one.getsockname()[1] for name, one in self._reserved.items()}
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.addresses: dict[str, str] = {}  # by the names HTTP, TCP and WebSocket, once started
        descriptor, self._output = tempfile.mkstemp(prefix="penstock-test-")
        os.close(descriptor)
        self._printed = ""  # what it printed before the file was removed

    @property
    def url(self) -> str:
        """Return the HTTP address, to pass to `Client`."""
        return self.addresses["HTTP"]

    @property
    def log(self) -> str:
        """Return everything that the broker has printed."""
        output = Path(self._output)
        return output.read_text() if output.exists() else self._printed

    def start(self, *, wait: bool = True) -> Self:
        """Start the broker, also again after `stop` or `kill`."""
        self.addresses = {}
        self.process = self._fork(self._forks) if self._forks else self._spawn()
        if wait:
            self.wait_until_started()
        return self

    def _fork(self, forks: ForkServer) -> ForkedProcess:
        flags: dict[str, object] = {"data_directory": str(self.data_dir)}
        for name, port in self.ports.items():
            server = {"ws": "websocket"}.get(name, name)
            flags |= {f"{server}_server.port": port, f"{server}_server.enabled": True}
        order = {"number": self._number, "output": self._output, "flags": flags}
        return ForkedProcess(
            forks, forks.ask(order | {"settings": self._settings, "env": self._env})
        )

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "penstock", "serve", "--data-dir", str(self.data_dir)]
        if self.database_url:
            command += ["--database-url", self.database_url]
        for name, port in self.ports.items():
            command += [f"--{name}-port", str(port)]
        for setting in self._settings:
            command += ["--set", setting]
        with Path(self._output).open("ab") as output:
            return subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._env},
                start_new_session=True,
            )

    def wait_until_started(self) -> None:
        """Wait until the broker answers over HTTP, and read its addresses."""
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            if self._ask("/health/ready").get("status", "starting") != "starting":
                self.addresses = self._ask("/health")["listeners"]
                return
            time.sleep(POLL_SECONDS)
        self._end(0.0)
        raise RuntimeError(f"the broker did not start:\n{self.log}")

    def _ask(self, path: str) -> dict[str, Any]:
        """Return the broker's answer, or an empty object. Tries HTTP and HTTPS."""
        context = ssl._create_unverified_context()
        for scheme in ("http", "https"):
            url = f"{scheme}://127.0.0.1:{self.ports['http']}{path}"
            try:
                with urllib.request.urlopen(url, timeout=5.0, context=context) as answer:
                    return dict(json.load(answer))
            except urllib.error.HTTPError as refused:
                with refused:
                    if refused.code == 503:
                        return dict(json.load(refused))
            except OSError:
                pass  # it does not listen yet, or not with this scheme
        return {}

    def kill(self) -> None:
        """Kill the broker with SIGKILL. Its embedded PostgreSQL, if it has one, stays."""
        assert self.process is not None
        self.process.kill()
        self._end(STOP_SECONDS)

    def stop(self, timeout: float = STOP_SECONDS) -> int:
        """Stop the broker with SIGTERM and return its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        if not self._end(timeout):
            raise RuntimeError(f"the broker did not stop within {timeout} s:\n{self.log}")
        assert self.process.returncode is not None
        return self.process.returncode

    def _end(self, timeout: float) -> bool:
        """Wait for the process, and kill it after `timeout` seconds."""
        assert self.process is not None
        ended = True
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            ended = False
            self.process.kill()
            self.process.wait()
        return ended

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self._clean_up()
            raise

    def __exit__(self, *failure: object) -> None:
        try:
            self.stop()
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        postgres = self.data_dir / ".penstock" / "postgres"
        if postgres.exists():
            server = EmbeddedPostgres(postgres)
            # A broker that was killed leaves its server running.
            server.stop("immediate") if self._temporary is None else server.remove()
        for reserved in self._reserved.values():
            reserved.close()
        self._printed = self.log
        Path(self._output).unlink()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _reserve_port() -> socket.socket:
    """Return a socket that is bound to a free port and never listens.

    While it is open, a server may listen on that port, stop and listen again, because all of them
    set SO_REUSEADDR, and the kernel gives the port to no one else.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


@pytest.fixture(scope="session")
def penstock_url() -> Iterator[str]:
    """Yield the address of a broker for the tests: a temporary one, or PENSTOCK_TEST_URL."""
    given = os.environ.get("PENSTOCK_TEST_URL")
    if given:
        yield given
        return
    with ThrowawayBroker(database_url=os.environ.get("PENSTOCK_TEST_DATABASE_URL")) as broker:
        yield broker.url


@pytest.fixture
def penstock_broker() -> Iterator[ThrowawayBroker]:
    """Yield a broker that only this test uses. Pass `penstock_broker.url` to a client."""
    with ThrowawayBroker() as broker:
        yield broker


@pytest.fixture
def penstock_name() -> Callable[[str], str]:
    """Return a function that makes names of queues, topics and groups unique to a test."""
    suffix = uuid.uuid4().hex[:12]

    def name(word: str) -> str:
        return f"{word}-{suffix}"

    return name


@pytest.fixture
def penstock_client(penstock_url: str) -> Iterator[SyncClient]:
    """Yield a client of the test broker. In async code, use `Client(penstock_url)` instead."""
    with SyncClient(penstock_url) as client:
        yield client
