"""Celery's empty tasks through Penstock, Redis and RabbitMQ, with a worker of two processes.

- Tasks per second: a backlog is there when the worker starts; from the first task to the last.
- How long after `delay()` a task begins, in an idle worker: the middle of many.

Acknowledgements are early and the prefetch multiplier is 4, as Celery has them by default. Queues of
RabbitMQ are durable, and publishes wait for its confirms. Redis writes its append-only file.

    make bench B=celery
"""

import os
import statistics
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.harness import Contest, Figure, spread
from bench.peer import logs
from bench.queues import Ground
from bench.topics import scratch

NOTE = struct.Struct("dd")  # of bench/peer/celery_app.py
TASKS = 2000
SENDERS = 4
IDLE_TASKS = 150
IDLE_PAUSE = 0.02  # seconds between tasks, so that each meets an idle worker
LATENCY_ROUNDS = 3
START_SECONDS = 120.0
ROUND_SECONDS = 300.0
ALWAYS = "Redis, appendfsync always"
RABBITMQ = "RabbitMQ, durable queues and publisher confirms"
PEERS: dict[str, Callable[[], AbstractContextManager[tuple[int, int]]]] = {
    ALWAYS: partial(logs.redis_server, "always"),
    "Redis, appendfsync everysec": partial(logs.redis_server, "everysec"),
    RABBITMQ: logs.rabbitmq_server,
}
AT_LEAST = {RABBITMQ: 0.6}  # of the rate
AT_MOST = {ALWAYS: 2.0}  # times the latency


@dataclass(slots=True)
class Side:
    """A broker that Celery uses."""

    url: str
    directory: Path

    def rate(self, tasks: int = TASKS) -> float:
        """Tasks per second of a worker that finds a backlog."""
        environment = self._environment()
        self._send(environment, tasks // SENDERS, senders=SENDERS)
        with self._worker(environment):
            notes = self._wait(environment, tasks)
        began = sorted(start for _, start in notes)
        return (tasks - 1) / (began[-1] - began[0])

    def latency(self) -> float:
        """Milliseconds from `delay()` to the start of a task, the middle of many."""
        environment = self._environment()
        with self._worker(environment):
            self._send(environment, 1)
            self._wait(environment, 1)
            self._send(environment, IDLE_TASKS, pause=IDLE_PAUSE)
            notes = self._wait(environment, IDLE_TASKS + 1)[1:]
        return statistics.median(start - sent for sent, start in notes) * 1e3

    def _environment(self) -> dict[str, str]:
        name = uuid.uuid4().hex
        given = {"BROKER": self.url, "QUEUE": name, "NOTES": str(self.directory / name)}
        more = {f"BENCH_{key}": value for key, value in given.items()}
        return {**os.environ, **more, "C_FORCE_ROOT": "1"}

    @staticmethod
    def _send(
        environment: dict[str, str], count: int, pause: float = 0.0, senders: int = 1
    ) -> None:
        code = f"from bench.peer.celery_app import send; send({count}, {pause})"
        running = [
            subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(senders)
        ]
        for process in running:
            if process.wait() != 0:
                raise RuntimeError("the tasks were not sent")

    @contextmanager
    def _worker(self, environment: dict[str, str]) -> Iterator[None]:
        command = [sys.executable, "-m", "celery", "-A", "bench.peer.celery_app", "worker"]
        command += ["-P", "prefork", "-c", "2", "-l", "ERROR", "-n", environment["BENCH_QUEUE"]]
        command += ["--without-mingle", "--without-gossip", "--without-heartbeat"]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
        try:
            yield
        finally:
            process.terminate()
            process.wait(START_SECONDS)

    @staticmethod
    def _wait(environment: dict[str, str], count: int) -> list[tuple[float, float]]:
        notes, deadline = Path(environment["BENCH_NOTES"]), time.monotonic() + ROUND_SECONDS
        while not notes.exists() or notes.stat().st_size < count * NOTE.size:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{count} tasks did not run in {ROUND_SECONDS:g} s")
            time.sleep(0.05)
        return [(sent, start) for sent, start in NOTE.iter_unpack(notes.read_bytes())]


def contests() -> Iterator[Contest | Figure]:
    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        ground = Ground(stack)
        ours = Side(f"penstock://127.0.0.1:{ground.port}", directory)
        peers: dict[str, Side] = {}
        for name, server in PEERS.items():
            try:
                port, _ = stack.enter_context(server())
            except logs.Missing as error:
                print(f"  left out: {name}: {error}")
                continue
            scheme = "amqp://guest:guest@" if name == RABBITMQ else "redis://"
            peers[name] = Side(f"{scheme}127.0.0.1:{port}", directory)
        for name, theirs in peers.items():
            yield Contest(
                name="Celery: empty tasks, prefork of 2",
                unit="tasks/s",
                ours=ours.rate,
                theirs=theirs.rate,
                against=name,
                at_least=AT_LEAST.get(name),
                rounds=3,
                warm_up=0,
            )
        yield from latencies(ours, peers)


def latencies(ours: Side, peers: dict[str, Side]) -> Iterator[Figure]:
    sides = {"": ours, **peers}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(LATENCY_ROUNDS):
        for name, side in sides.items():
            taken[name].append(side.latency())
    for name in peers:
        ratios = [a / b for a, b in zip(taken[""], taken[name], strict=True)]
        ratio, most = statistics.median(ratios), AT_MOST.get(name)
        yield Figure(
            name="Celery: from delay() to the start of a task, p50",
            value=statistics.median(taken[""]),
            unit="ms",
            target=f"≤ {most:g}x" if most else "",
            met=ratio <= most if most else None,
            against=name,
            against_value=statistics.median(taken[name]),
            ratio=ratio,
            spread=spread(ratios),
            detail={"ours": taken[""], "theirs": taken[name]},
        )
