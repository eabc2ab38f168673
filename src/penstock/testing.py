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

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

from penstock.client import SyncClient

START_SECONDS = 120.0
STOP_SECONDS = 30.0
_ADDRESS = re.compile(r"  (HTTP|TCP|Kafka|WebSocket) +(\S+)")


class ThrowawayBroker:
    """A broker with a temporary data directory, for tests: `with ThrowawayBroker() as broker`."""

    def __init__(self, *, database_url: str | None = None, **settings: str) -> None:
        """`settings` are configuration keys with two underscores for each dot, such as
        `topics__segment_bytes="1Mi"`.
        """
        self._database_url = database_url
        self._settings = settings
        self._addresses: dict[str, str] = {}
        self._output: list[str] = []
        self._directory: Path | None = None
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """The HTTP address, to pass to `Client`."""
        return self._addresses["HTTP"]

    def __enter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-test-"))
        self._directory.chmod(0o755)  # an embedded PostgreSQL under root is another user's
        command = [sys.executable, "-m", "penstock", "serve"]
        command += ["--data-dir", str(self._directory / "data")]
        command += ["--http-port", "0", "--tcp-port", "0", "--ws-port", "0"]
        command += ["--kafka-port", "0"]
        if self._database_url:
            command += ["--database-url", self._database_url]
        for name, value in self._settings.items():
            command += ["--set", f"{name.replace('__', '.')}={value}"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        ready = threading.Event()
        threading.Thread(target=self._read, args=(ready,), daemon=True).start()
        if not ready.wait(START_SECONDS) or "HTTP" not in self._addresses:
            self.__exit__()
            raise RuntimeError("the broker did not start:\n" + "".join(self._output))
        return self

    def _read(self, ready: threading.Event) -> None:
        """Read what the broker says: its addresses first, then to the end, or it would block."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._output.append(line)
            if match := _ADDRESS.match(line):
                self._addresses[match[1]] = match[2]
            elif line.startswith("  data "):
                ready.set()
        ready.set()

    def __exit__(self, *failure: object) -> None:
        process, directory = self._process, self._directory
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


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
