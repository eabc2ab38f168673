"""Exactly once, for real: drivers, Python workers and the broker are killed (-9) while records flow; all arrive once.

The normal form kills three times; `make soak` twenty times and more records.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from penstock.pipeline.link import TopicLink
from penstock.pipeline.queue_sink import PushLink
from penstock.wire import frames
from tests.conftest import fresh_database
from tests.pipeline.support import batch_rows
from tests.pipeline.test_queue_source import options, rows_of
from tests.support.broker import BrokerProcess
from tests.support.wait import until

ROOT = Path(__file__).parents[2]


class Pipelines:
    """topic -> queue and queue -> topic, each in a driver process that is started again whenever it dies."""

    def __init__(self, server: BrokerProcess, tmp_path: Path, tag: str) -> None:
        host, port = server.tcp
        common = [f"{host}:{port}", server.url, server.database_url]
        self._commands = {
            "first": ["topic-queue", f"in-{tag}", f"mid-{tag}", str(tmp_path / "c1"), *common, "local[2]"],
            "second": ["queue-topic", f"mid-{tag}", f"out-{tag}", str(tmp_path / "c2"), *common, "local[2]"],
        }
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._log = tmp_path / "drivers.log"
        self.restarts = 0

    def ensure(self) -> None:
        for name, command in self._commands.items():
            process = self.processes.get(name)
            if process is None or process.poll() is not None:
                self.restarts += process is not None
                with self._log.open("a") as log:
                    self.processes[name] = subprocess.Popen(
                        [sys.executable, "-m", "tests.pipeline.kill_driver", *command],
                        stdout=log,
                        stderr=log,
                        cwd=ROOT,
                        text=True,
                        start_new_session=True,
                    )

    def kill_driver(self, name: str) -> None:
        process = self.processes[name]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_worker(self) -> bool:
        """A Python worker of either driver, which may be in the middle of a task; the JVM sees the task fail."""
        workers = []
        for process in self.processes.values():
            try:
                workers += [
                    child
                    for child in psutil.Process(process.pid).children(recursive=True)
                    if "pyspark.daemon" in " ".join(child.cmdline()) and child.children() == []
                ]
                if workers:
                    random.choice(workers).kill()
                    return True
            except psutil.NoSuchProcess:
                continue
        return False

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text()[-4000:] if self._log.exists() else ""


@pytest.mark.timeout(1800)
@pytest.mark.spark
def test_every_record_arrives_once_and_in_order_whatever_is_killed(postgres, scratch, tmp_path, soak) -> None:
    kills, total = (20, 20_000) if soak else (3, 400)
    tag = uuid.uuid4().hex[:8]
    url = fresh_database(postgres)
    server = BrokerProcess(scratch / "data", database_url=url)
    server.database_url = url
    server.start()
    pipelines = Pipelines(server, tmp_path, tag)
    host, port = server.tcp
    tcp = f"{host}:{port}"
    stop = threading.Event()
    try:
        link = TopicLink(tcp, 120)
        producer = (uuid.uuid4().bytes, 0)

        def produce() -> None:
            """Steadily, as an idempotent producer: what the broker forgets while it is dead is sent again."""
            for sequence, first in enumerate(range(0, total, 20)):
                link.append(
                    frames.produce_batch(
                        f"in-{tag}", [b"%d" % i for i in range(first, first + 20)], (producer[0], sequence)
                    )
                )
                if stop.wait(0.02):
                    return

        link.create(f"in-{tag}")
        warm = {"queue": f"mid-{tag}", "partition": "warm", "payload": -1}
        PushLink(server.url, None, 30).push([json.dumps(warm).encode()], repeatable=False)
        thread = threading.Thread(target=produce, daemon=True)
        thread.start()
        pipelines.ensure()

        def arrived() -> int:
            try:
                with TopicLink(tcp, 30) as asking:
                    return asking.info(f"out-{tag}").next_offset
            except Exception:  # noqa: BLE001 - the topic is made by the first batch; the broker may be down
                return 0

        victims = ["driver", "broker", "worker", *random.choices(["driver", "broker", "worker"], k=max(0, kills - 3))]
        until(lambda: arrived() > 0, 180, pipelines.log)
        for number, victim in enumerate(victims):
            goal = 1 + (total * (number + 1)) // (len(victims) + 2)
            until(lambda goal=goal: _kept_running(pipelines) and arrived() >= goal, 300, f"{victim}: {pipelines.log}")
            which = random.choice(["first", "second"])
            if victim == "driver":
                pipelines.kill_driver(which)
            elif victim == "broker":
                server.kill()
                time.sleep(0.2)
                server.start()
            else:
                # When everything has arrived already, Spark may have let its idle workers go: there is none to kill.
                until(
                    lambda: _kept_running(pipelines) and (pipelines.kill_worker() or arrived() >= total + 1),
                    300,
                    "a Python worker",
                )
        until(lambda: _kept_running(pipelines) and arrived() >= total + 1, 600, "all records have arrived")
        thread.join(60)
        assert arrived() == total + 1
    finally:
        stop.set()
        pipelines.stop()
    try:
        _check_ledger(tcp, url, tag, total)
    finally:
        server.stop()


def _kept_running(pipelines: Pipelines) -> bool:
    pipelines.ensure()
    return True


def _check_ledger(tcp: str, url: str, tag: str, total: int) -> None:
    from penstock.pipeline.queue_source import QueueReader

    reader = QueueReader(options(url, f"mid-{tag}", streaming=False))
    queue: dict[str, list[int]] = defaultdict(list)
    for row in sorted(rows_of(reader, reader.partitions()), key=lambda row: (row["partition"], row["seq"])):
        queue[row["partition"]].append(json.loads(row["payload"]))
    assert queue.pop("warm") == [-1]
    assert dict(queue) == {f"p{k}": list(range(k, total, 3)) for k in range(3)}
    out: dict[str, list[int]] = defaultdict(list)
    for row in batch_rows(broker=tcp, topic=f"out-{tag}"):
        partition, _, value = row["payload"].decode().partition(":")
        out[partition].append(int(value))
    assert out.pop("warm") == [-1]
    assert dict(out) == {f"p{k}": list(range(k, total, 3)) for k in range(3)}
