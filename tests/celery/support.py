"""Real workers, and an application that sends them tasks."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from celery import Celery

import penstock.celery  # noqa: F401
from tests.docs.tools import ROOT
from tests.support import guard
from tests.support.wait import until

READY_SECONDS = 120.0


class Worker:
    """`celery worker` on the tasks of `tests/celery/shop.py`."""

    def __init__(self, shop: "Shop", pool: str, *arguments: str, **settings: Any) -> None:
        self.name = f"w{len(shop.workers)}@test-{shop.queue}"
        self.log_path = shop.directory / f"{self.name}.log"
        command = [sys.executable, "-m", "celery", "-A", "tests.celery.shop", "worker"]
        command += ["-P", pool, "-c", "2", "-l", "INFO", "-n", self.name, *arguments]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=shop.environment(**settings),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        guard.watch(self.process.pid)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self) -> "Worker":
        until(
            lambda: f"{self.name} ready" in self.log or self.process.poll() is not None,
            READY_SECONDS,
            f"{self.name} is ready",
        )
        assert self.process.poll() is None, self.log
        return self

    def kill(self) -> None:
        """kill -9 to the worker and its pool."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self, timeout: float = 60.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"the worker did not stop:\n{self.log}") from None
        return self.process.returncode


class Shop:
    """An application, its workers and the ledger that their tasks write."""

    def __init__(self, directory: Path, url: str, queue: str) -> None:
        self.directory = directory
        self.url = url
        self.queue = queue
        self.ledger_path = directory / "ledger"
        self.workers: list[Worker] = []
        self.settings: dict[str, Any] = {}
        self._apps: list[Celery] = []

    def environment(self, **settings: Any) -> dict[str, str]:
        given = {"broker": self.url, "queue": self.queue, "ledger": self.ledger_path}
        given |= self.settings | settings
        shop = {f"SHOP_{name.upper()}": str(value) for name, value in given.items()}
        return {**os.environ, **shop, "C_FORCE_ROOT": "1", "PYTHONPATH": str(ROOT)}

    def worker(self, pool: str = "prefork", *arguments: str, **settings: Any) -> Worker:
        """Start a worker and wait until it is ready."""
        return self.start_worker(pool, *arguments, **settings).wait_ready()

    def start_worker(self, pool: str, *arguments: str, **settings: Any) -> Worker:
        quick = ("--without-mingle", "--without-gossip")
        worker = Worker(self, pool, *quick, *arguments, **settings)
        self.workers.append(worker)
        return worker

    def app(self, url: str | None = None, **conf: Any) -> Celery:
        app = Celery("test", broker=url or self.url, set_as_current=False)
        app.conf.update(
            {"task_default_queue": self.queue, "task_create_missing_queues": True} | conf
        )
        self._apps.append(app)
        return app

    def send(self, app: Celery, task: str, *args: Any, **options: Any) -> Any:
        return app.send_task(f"tests.celery.shop.{task}", args, **options)

    def ledger(self) -> list[tuple[str, str, int, float]]:
        """What happened: event, name, process and time."""
        if not self.ledger_path.exists():
            return []
        lines = [line.split() for line in self.ledger_path.read_text().splitlines()]
        return [(event, name, int(pid), float(at)) for event, name, pid, at in lines]

    def count(self, event: str) -> Counter[str]:
        return Counter(name for one, name, _, _ in self.ledger() if one == event)

    def wait_for_ends(self, names: set[str], timeout: float = 120.0) -> None:
        until(lambda: names <= set(self.count("end")), timeout, f"{names} ended: {self.logs()}")

    def logs(self) -> str:
        return "\n".join(worker.log[-3000:] for worker in self.workers)

    def __enter__(self) -> "Shop":
        return self

    def __exit__(self, *failure: object) -> None:
        for worker in self.workers:
            worker.process.poll()
            if worker.process.returncode is None:
                worker.kill()
        for app in self._apps:
            app.close()
