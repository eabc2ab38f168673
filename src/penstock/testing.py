"""Fixtures for pytest: a broker that is thrown away after the tests, and names of their own.

    # conftest.py
    pytest_plugins = ["penstock.testing"]

    # test_orders.py
    def test_an_order_is_billed(penstock_client, penstock_name):
        queue = penstock_name("orders")
        penstock_client.push(queue, {"id": 7})
        ...

The broker is started once per session, on free ports, with an embedded PostgreSQL in a temporary
directory (`pip install 'penstock[server]'`). With PENSTOCK_TEST_URL in the environment that broker
is used instead, and with PENSTOCK_TEST_DATABASE_URL the started one uses that PostgreSQL. Starting
takes seconds and a test none, since tests share the broker and not the names.
"""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from penstock.client import SyncClient
from penstock.database.embedded import EmbeddedPostgres

START_SECONDS = 120.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.02


class ThrowawayBroker:
    """A broker in a process of its own, for tests: `with ThrowawayBroker() as broker`.

    It listens on free ports, and on the same ones when it is started again.
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
        self._temporary: Path | None = None
        if data_dir is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="penstock-test-"))
            self._temporary.chmod(0o755)  # an embedded PostgreSQL under root is another user's
            data_dir = self._temporary / "data"
        self.data_dir = data_dir
        self._arguments = ["--data-dir", str(data_dir)]
        if database_url:
            self._arguments += ["--database-url", database_url]
        for name, value in settings.items():
            self._arguments += ["--set", f"{name.replace('__', '.')}={value}"]
        self._env = {**os.environ, **(env or {})}
        # Open while it may be started again, so that it has the same ports each time.
        self._reserved = {name: _reserve_port() for name in ("http", "tcp", "kafka", "ws")}
        self.ports = {name: one.getsockname()[1] for name, one in self._reserved.items()}
        self.process: subprocess.Popen[str] | None = None
        self.addresses: dict[str, str] = {}  # by the names HTTP, TCP and WebSocket, once it serves
        self.output: list[str] = []  # lines of standard output and error

    @property
    def url(self) -> str:
        """The HTTP address, to pass to `Client`."""
        return self.addresses["HTTP"]

    @property
    def log(self) -> str:
        """Everything the broker has printed."""
        return "".join(self.output)

    def start(self, *, wait: bool = True) -> Self:
        """Start the broker, also again after `stop` or `kill`."""
        command = [sys.executable, "-m", "penstock", "serve", *self._arguments]
        for name, port in self.ports.items():
            command += [f"--{name}-port", str(port)]
        self.addresses = {}
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._env,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        if wait:
            self.wait_until_started()
        return self

    def wait_until_started(self) -> None:
        """Ask over HTTP until the broker has started, and learn its addresses."""
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
        """Return what the broker answers, or an empty object. It may speak TLS."""
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

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Read what the broker prints to the end, or it would block."""
        assert process.stdout is not None
        with process.stdout as lines:
            self.output.extend(lines)

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
        self._reader.join(5.0)
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
        if postgres.exists():  # left by a broker that was killed
            EmbeddedPostgres(postgres).stop("immediate")
        for reserved in self._reserved.values():
            reserved.close()
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
    """The address of a broker for the tests: a temporary one, or PENSTOCK_TEST_URL."""
    given = os.environ.get("PENSTOCK_TEST_URL")
    if given:
        yield given
        return
    with ThrowawayBroker(database_url=os.environ.get("PENSTOCK_TEST_DATABASE_URL")) as broker:
        yield broker.url


@pytest.fixture
def penstock_name() -> Callable[[str], str]:
    """A function that returns names of queues, topics and groups that no other test uses."""
    suffix = uuid.uuid4().hex[:12]

    def name(word: str) -> str:
        return f"{word}-{suffix}"

    return name


@pytest.fixture
def penstock_client(penstock_url: str) -> Iterator[SyncClient]:
    """A client of the test broker. In async code: `async with Client(penstock_url) as client`."""
    with SyncClient(penstock_url) as client:
        yield client
