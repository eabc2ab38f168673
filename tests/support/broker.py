"""A real `penstock serve` process to test against: started on free ports, killed or stopped at
will.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.support import guard
from tests.support.ports import reserve_port
from tests.support.wait import DATABASE_TIMEOUT, until

START_TIMEOUT = 90


class BrokerProcess:
    """One broker on `data_dir`. Use as a context manager, or call `start` and `stop`/`kill`
    yourself.

    `settings` are `--set` pairs with dots as double underscores: `topics__fsync="always"`. Without
    a database URL it runs its embedded PostgreSQL, and `data_dir` must be reachable by other users
    (the fixture `scratch`).
    """

    def __init__(
        self, data_dir: Path, *, database_url: str | None = None, env: Any = None, **settings: Any
    ) -> None:
        self.data_dir = data_dir
        self.database_url = database_url
        self._postgres = (
            data_dir / ".penstock" / "postgres"
        )  # where the embedded one is, if it has one
        self._arguments = ["--data-dir", str(data_dir)]
        if database_url:
            self._arguments += ["--database-url", database_url]
            settings.setdefault("database__acquire_timeout", DATABASE_TIMEOUT)
        for name, value in settings.items():
            self._arguments += ["--set", f"{name.replace('__', '.')}={value}"]
        self._env = {**os.environ, **(env or {})}
        self.process: subprocess.Popen[str] | None = None
        self.addresses: dict[str, str] = {}
        self.output: list[str] = []  # standard output and error, line by line
        # Kept while it does not run: it has the same ports each time.
        self._reserved = {name: reserve_port() for name in ("HTTP", "TCP", "Kafka", "WebSocket")}
        self.ports = {name: one.getsockname()[1] for name, one in self._reserved.items()}

    def start(self, *, wait: bool = True) -> "BrokerProcess":
        """Start, also again."""
        ports = [
            *("--http-port", str(self.ports["HTTP"])),
            *("--tcp-port", str(self.ports["TCP"])),
            *("--kafka-port", str(self.ports["Kafka"])),
            *("--ws-port", str(self.ports["WebSocket"])),
        ]
        self.addresses = {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "serve", *ports, *self._arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._env,
            start_new_session=True,
        )
        guard.watch(self.process.pid)
        guard.watch_postgres(self._postgres)
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        if wait:
            started = self.process
            until(
                lambda: "HTTP" in self.addresses or started.poll() is not None,
                START_TIMEOUT,
                "broker is ready",
            )
            assert started.poll() is None, self.log
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        addresses: dict[str, str] = {}
        assert process.stdout is not None
        for line in process.stdout:
            self.output.append(line)
            words = line.split()
            if (
                line.startswith("  ")
                and len(words) == 2
                and words[0] in ("HTTP", "TCP", "Kafka", "WebSocket")
            ):
                addresses[words[0]] = words[1]
            elif line.startswith("  data "):
                self.addresses = addresses
        process.stdout.close()

    @property
    def url(self) -> str:
        return self.addresses["HTTP"]

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

    @property
    def log(self) -> str:
        return "".join(self.output)

    def kill(self) -> None:
        """kill -9; the embedded PostgreSQL, if there is one, goes on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self._reader.join(5)

    def stop(self, timeout: float = 30) -> int:
        """SIGTERM and wait; the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(
                    f"the broker did not stop within {timeout} s:\n{self.log}"
                ) from None
        self._reader.join(5)
        return self.process.returncode

    def __enter__(self) -> "BrokerProcess":
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.stop()
        self._stop_left_over_postgres()

    def _stop_left_over_postgres(self) -> None:
        from penstock.database.embedded import EmbeddedPostgres

        if self._postgres.exists():
            EmbeddedPostgres(self._postgres).stop("immediate")
