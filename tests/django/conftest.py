"""A site on the broker's PostgreSQL, its worker, and the ledger of its tasks."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import fresh_database
from tests.docs.tools import ROOT
from tests.support import guard
from tests.support.broker import BrokerProcess
from tests.support.wait import until


class Site:
    """A Django site. `run` runs code in a process of it, `worker` starts a worker."""

    def __init__(self, directory: Path, broker: str, database: str) -> None:
        self.directory = directory
        self.prefix = f"s-{uuid.uuid4().hex[:8]}."
        self.ledger_path = directory / "ledger"
        self.environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.django.site_settings",
            "PYTHONPATH": str(ROOT),
            "SITE_BROKER": broker,
            "SITE_DATABASE": database,
            "SITE_PREFIX": self.prefix,
            "SITE_LEDGER": str(self.ledger_path),
        }
        self.workers: list[subprocess.Popen[bytes]] = []
        self._shell: subprocess.Popen[str] | None = None

    def manage(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "django", *arguments]
        environment = self.environment | variables
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )

    def run(self, code: str) -> str:
        """Run code with the tasks imported, return what it prints."""
        if self._shell is None:
            self._shell = subprocess.Popen(
                [sys.executable, "-m", "tests.django.shell"],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(self.directory / "shell.log").open("wb"),
                text=True,
            )
            guard.watch(self._shell.pid)
        assert self._shell.stdin
        assert self._shell.stdout
        print(json.dumps(code), file=self._shell.stdin, flush=True)
        answer = self._shell.stdout.readline()
        assert answer, (self.directory / "shell.log").read_text()
        printed: str = json.loads(answer)
        return printed

    def result(self, task: str, identity: str) -> str:
        """Wait until a task is finished. Returns status, attempts, and its value or its error."""
        return self.run(
            f"import time\nresult, deadline = {task}.get_result({identity!r}), time.time() + 90\n"
            "while not result.is_finished:\n"
            "    assert time.time() < deadline\n"
            "    time.sleep(0.05)\n"
            "    result.refresh()\n"
            "errors = [error.exception_class_path for error in result.errors]\n"
            "print(result.status, result.attempts, *(errors or [result.return_value]))"
        )

    def send(self, *arguments: str) -> int:
        command = [sys.executable, "-m", "tests.django.sender", *arguments]
        return subprocess.run(command, cwd=ROOT, env=self.environment, timeout=120).returncode

    def worker(self, *arguments: str) -> subprocess.Popen[bytes]:
        log = self.directory / f"worker-{len(self.workers)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "django", "penstock_worker", *arguments],
                cwd=ROOT,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        guard.watch(process.pid)
        self.workers.append(process)
        until(lambda: b"running tasks" in log.read_bytes() or process.poll() is not None, 60)
        assert process.poll() is None, log.read_text()
        return process

    def logs(self) -> str:
        return "".join(path.read_text()[-3000:] for path in self.directory.glob("worker-*.log"))

    def count(self, event: str) -> Counter[str]:
        if not self.ledger_path.exists():
            return Counter()
        lines = [line.split() for line in self.ledger_path.read_text().splitlines()]
        return Counter(name for one, name, _, _ in lines if one == event)

    def wait_for_ends(self, names: set[str]) -> None:
        until(lambda: names <= set(self.count("end")), 120, self.logs())

    def close(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
        if self._shell is not None:
            self._shell.communicate(timeout=60)


def stop(worker: "subprocess.Popen[bytes]") -> int:
    worker.send_signal(signal.SIGTERM)
    return worker.wait(60)


def migrated(site: Site) -> Site:
    done = site.manage("migrate", "-v", "0")
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture(scope="package")
def database(postgres: Any) -> str:
    return fresh_database(postgres)


@pytest.fixture(scope="package")
def broker(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("django"), database_url=database) as process:
        migrated(Site(tmp_path_factory.mktemp("site"), process.url, database))
        yield process


@pytest.fixture
def api(broker: BrokerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.url, timeout=60) as client:
        yield client


@pytest.fixture
def site(broker: BrokerProcess, database: str, tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, broker.url, database)
    yield site
    site.close()


@pytest.fixture
def site_on_sqlite(broker: BrokerProcess, tmp_path: Path) -> Iterator[Site]:
    site = migrated(Site(tmp_path, broker.url, f"sqlite://{tmp_path}/site.db"))
    yield site
    site.close()
