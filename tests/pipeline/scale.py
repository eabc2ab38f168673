"""What `recover` and `rollup` take at scale: time, and the memory of every process that takes part.

    python -m tests.pipeline.scale [EVENTS]

writes EVENTS (10 million) events of 1000 partitions into buffer files of two brokers, recovers them
into a fresh PostgreSQL through one broker, rolls up what came, and prints the peak of each
process's own memory (without what it shares, sampled twice a second) by quarters of the time, so
that growth shows.
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

import psutil

from penstock.buffer.events import encode
from penstock.queues.types import Item
from tests.conftest import running_postgres
from tests.support.broker import BrokerProcess

EVENTS_PER_FILE = 100_000
PARTITIONS = 1000


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
            found: dict[str, float] = {}
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
                        found[name] = found.get(name, 0.0) + (memory.rss - memory.shared) / 2**20
                    except psutil.Error:
                        continue
            self.samples.append((time.monotonic() - self._began, found))

    def _name(self, process: psutil.Process, root: psutil.Process) -> str:
        if process == root:
            return "job: driver's Python"
        return "job: driver's JVM" if "java" in process.name() else "job: all Python workers"

    def table(self) -> dict[str, list[int]]:
        """MiB by role: the peak in each quarter of the time."""
        end = self.samples[-1][0] + 1e-9
        peaks: dict[str, list[int]] = {}
        for at, found in self.samples:
            for role, held in found.items():
                place = peaks.setdefault(role, [0, 0, 0, 0])
                quarter = int(4 * at / end)
                place[quarter] = max(place[quarter], round(held))
        return peaks


def job(broker: BrokerProcess, server: Any, *arguments: str) -> None:
    command = [
        sys.executable,
        "-m",
        "penstock",
        "pipeline",
        "run",
        *arguments,
        "--master",
        "local[2]",
    ]
    began = time.monotonic()
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert broker.process is not None
    with Watcher(job=running.pid, broker=broker.process.pid, postgres=server.pid()) as watcher:
        out, _ = running.communicate()
    took = time.monotonic() - began
    shown = [word for word in arguments if "/" not in word]
    print(
        json.dumps(
            {
                "job": shown,
                "seconds": round(took, 1),
                "exit": running.returncode,
                "said": out.strip(),
            }
        )
    )
    for role, peaks in sorted(watcher.table().items()):
        print(f"  {role:28} MiB by quarter: {peaks}", flush=True)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    with (
        tempfile.TemporaryDirectory(prefix="penstock-scale-") as name,
        running_postgres() as server,
    ):
        directory = Path(name)
        places = write_files(directory / "buffers", count)
        print(
            f"{count:,} events in {sum(len(os.listdir(place)) for place in places)} files",
            flush=True,
        )
        with BrokerProcess(directory / "data", database_url=server.url) as broker:
            job(broker, server, "recover", *map(str, places), "--url", broker.url)
            report = str(directory / "report.html")
            until = ("--since", "24h", "--queue", "scale", "--html", report)
            job(broker, server, "rollup", *until, "--database", server.url)


if __name__ == "__main__":
    main()
