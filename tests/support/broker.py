"""A broker in a process to test against: started on free ports, killed or stopped at will."""

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self

from penstock.testing import ForkServer, ThrowawayBroker
from tests.support import guard
from tests.support.wait import DATABASE_TIMEOUT

ROOT = Path(__file__).parents[2]


class Forks(ForkServer):
    """The process that forks the brokers of this test run (`tests.support.forks`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # tests start brokers from threads
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"
            },
        )
        guard.watch(self._process.pid)
        atexit.register(self.close)

    def next_number(self) -> int:
        return 0

    def ask(self, order: Any) -> Any:
        if isinstance(order, dict):
            order |= {"env": {**os.environ, **order["env"]}, "directory": str(Path.cwd())}
        with self._lock:
            return super().ask(order)

    def close(self) -> None:
        self._process.communicate()
        atexit.unregister(self.close)
        forks.cache_clear()


forks = cache(Forks)


def stop_forks() -> None:
    """End the process that forks brokers, if there is one."""
    if forks.cache_info().currsize:
        forks().close()


class BrokerProcess(ThrowawayBroker):
    """The broker of `penstock.testing`, which does not outlive a test run that is killed and is
    patient with a busy database.

    Without a database URL it runs its embedded PostgreSQL, and `data_dir` must be reachable by
    other users (the fixture `scratch`).
    """

    forked = True  # from a process with everything imported, which saves a second

    def __init__(
        self, data_dir: Path, *, database_url: str | None = None, env: Any = None, **settings: Any
    ) -> None:
        if database_url:
            settings.setdefault("database__acquire_timeout", DATABASE_TIMEOUT)
        if database_url and self.forked:
            settings["database__url"] = database_url
        super().__init__(data_dir, database_url=database_url, env=env, **settings)

    def start(self, *, wait: bool = True) -> Self:
        self._forks = forks() if self.forked else None
        super().start(wait=False)
        assert self.process is not None
        guard.watch(self.process.pid)
        guard.watch_postgres(self.data_dir / ".penstock" / "postgres")
        if wait:
            self.wait_until_started()
        return self

    @property
    def tcp(self) -> tuple[str, int]:
        host, _, port = self.addresses["TCP"].rpartition("//")[2].rpartition(":")
        return host, int(port)

    @property
    def kafka(self) -> str:
        """host:port, as Kafka's clients want it."""
        return self.addresses["Kafka"]

    @property
    def websocket(self) -> str:
        return self.addresses["WebSocket"]


@contextmanager
def quiet_broker(directory: Path, database_url: str) -> Iterator[BrokerProcess]:
    """A broker that must not have logged an error at the end."""
    with BrokerProcess(directory, database_url=database_url) as broker:
        yield broker
        broker.stop()
        assert [line for line in broker.log.splitlines() if '"level":"error"' in line] == []


class ServeProcess(BrokerProcess):
    """The broker as `penstock serve` starts it, from the command line on; also of another release."""

    forked = False
