"""What jobs take at scale: time, and the memory of every process that takes part.

    python -m tests.pipeline.scale archive [RECORDS]
    python -m tests.pipeline.scale recover [EVENTS]

`archive` fills a topic with RECORDS (50 million) records and archives it in one run, then looks
whether the table has each of them once. `recover` writes EVENTS (10 million) events of 1000
partitions into buffer files of two brokers, recovers them into a fresh PostgreSQL through one
broker, and rolls up what came. Both print the peak of each process's memory (sampled twice a
second) by quarters of the time, so that growth shows: resident for the driver, for others without
what they share.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pyarrow import parquet

from penstock.buffer.events import encode
from penstock.pipeline.lake.table import LakeTable
from penstock.queues.types import Item
from tests.conftest import running_postgres
from tests.support.broker import ServeProcess
from tests.support.topics import append, random_records

EVENTS_PER_FILE = 100_000
PARTITIONS = 1000
RECORD_BYTES = 60
DRIVER, JVM, WORKERS = "driver's Python", "driver's JVM", "all Python workers"


def write_files(directory: Path, count: int) -> list[Path]:
    """As two brokers leave them behind after an outage."""
    places = [directory / "one", directory / "two"]
    for place in places:
        place.mkdir(parents=True)
    for number, first in enumerate(range(0, count, EVENTS_PER_FILE)):
        lines = encode(
            Item("scale", b'{"id":%d,"text":"%s"}' % (i, b"x" * 80), f"p{i % PARTITIONS}", f"t{i}")
            for i in range(first, min(count, first + EVENTS_PER_FILE))
        )
        name = f"failover_{number:020d}.buf"
        (places[number % 2] / name).write_bytes(b"".join(lines))
    return places


class Watcher:
    """Samples the memory of process trees until told to stop."""

    def __init__(self, **roots: int) -> None:
        self._roots = roots
        self.samples: list[tuple[float, dict[str, float]]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watcher":
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(0.5):
            collected: dict[str, float] = {}
            for role, pid in self._roots.items():
                try:
                    root = psutil.Process(pid)
                    processes = [root, *root.children(recursive=True)]
                except psutil.NoSuchProcess:
                    continue
                for process in processes:
                    try:
                        name = role if role != "job" else self._name(process, root)
                        memory = process.memory_info()
                        shared = 0 if name in (DRIVER, JVM) else memory.shared
                        collected[name] = collected.get(name, 0.0) + (memory.rss - shared) / 2**20
                    except psutil.Error:
                        continue
            self.samples.append((time.monotonic() - self._began, collected))

    def _name(self, process: psutil.Process, root: psutil.Process) -> str:
        if process == root:
            return DRIVER
        return JVM if "java" in process.name() else WORKERS

    def table(self) -> dict[str, list[int]]:
        """MiB by role: the peak in each quarter of the time."""
        end = self.samples[-1][0] + 1e-9
        peaks: dict[str, list[int]] = {}
        for at, result in self.samples:
            for role, held in result.items():
                place = peaks.setdefault(role, [0, 0, 0, 0])
                quarter = int(4 * at / end)
                place[quarter] = max(place[quarter], round(held))
        return peaks


def job(broker: ServeProcess, server: Any, *arguments: str) -> dict[str, Any]:
    """Run a job; its time and the memory by quarters, which are printed too."""
    command = [sys.executable, "-m", "penstock", "pipeline", "run", *arguments]
    began = time.monotonic()
    environment = {k: v for k, v in os.environ.items() if k != "JAVA_TOOL_OPTIONS"}  # the tests'
    running = subprocess.Popen(
        [*command, "--master", "local[2]"], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert broker.process is not None
    with Watcher(job=running.pid, broker=broker.process.pid, postgres=server.pid()) as watcher:
        out, _ = running.communicate()
    result = {
        "job": [word for word in arguments if "/" not in word],
        "seconds": round(time.monotonic() - began, 1),
        "exit": running.returncode,
        "answer": out.strip(),
    }
    print(json.dumps(result))
    peaks = watcher.table()
    for role, by_quarter in sorted(peaks.items()):
        print(f"  {role:28} MiB by quarter: {by_quarter}", flush=True)
    return {**result, "peaks": peaks}


def recover(directory: Path, server: Any, count: int) -> None:
    places = write_files(directory / "buffers", count)
    files = sum(len(os.listdir(place)) for place in places)
    print(f"{count:,} events in {files} files", flush=True)
    with ServeProcess(directory / "data", database_url=server.url) as broker:
        job(broker, server, "recover", *map(str, places), "--url", broker.url)
        report = str(directory / "report.html")
        until = ("--since", "24h", "--queue", "scale", "--html", report)
        job(broker, server, "rollup", *until, "--database", server.url)


def archive(directory: Path, server: Any, count: int) -> dict[str, Any]:
    """The run's figures, once the table has every record once."""
    data, lake = directory / "data", directory / "lake"
    append(data, "scale", random_records(count, RECORD_BYTES))
    print(f"{count:,} records of {RECORD_BYTES} bytes", flush=True)
    with ServeProcess(data, database_url=server.url) as broker:
        reach = ("--broker", "{}:{}".format(*broker.tcp), "--url", broker.url)
        result = job(broker, server, "archive", str(lake), "--topic", "scale", *reach)
    assert result["exit"] == 0, result
    table = LakeTable(str(lake), "topic", "scale")
    seen = np.zeros(count, np.uint8)
    for file in table.require().files():
        offsets = parquet.read_table(table.storage.local / file.path, columns=["offset"])
        seen[offsets.column(0).to_numpy()] += 1
    assert (seen == 1).all(), "every offset once"
    size = sum(file.bytes for file in table.require().files()) / 2**20
    print(f"  {count / result['seconds']:,.0f} records/s, {size:,.0f} MiB, each offset once")
    return result


def main() -> None:
    name, *given = sys.argv[1:]
    run, count = {"archive": (archive, 50_000_000), "recover": (recover, 10_000_000)}[name]
    with (
        tempfile.TemporaryDirectory(prefix="penstock-scale-", dir="/var/tmp") as directory,
        running_postgres() as server,
    ):
        run(Path(directory), server, int(given[0]) if given else count)


if __name__ == "__main__":
    main()
