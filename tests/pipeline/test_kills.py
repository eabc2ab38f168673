"""Exactly once, for real: the driver, executors' JVMs, Python workers, the broker and PostgreSQL are
killed (-9) while records flow from a topic to a queue, from there to a topic, and from there to
Parquet, on a cluster. All arrive once, in order.

The usual form kills three of them, and continues on one core what two began. `make soak` kills
twenty times, starts the driver on 1, 2 and 4 cores in turn, and runs twice: once as above, and once
with a consumer of the queue whose messages are deleted as soon as they are acknowledged.
"""

import asyncio
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
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pyarrow.parquet as pq
import pytest

from penstock.client import Client
from penstock.database.embedded import EmbeddedPostgres
from penstock.errors import PenstockError
from penstock.net.broker_caller import BrokerCaller
from penstock.net.topic_link import TopicLink
from penstock.pipeline.sinks.queue import PushLink
from penstock.protocol import frames
from tests.pipeline.cluster import ENV, Cluster, kill_all
from tests.pipeline.support import batch_rows
from tests.pipeline.test_queue_source import options, rows_of
from tests.support import guard
from tests.support.broker import BrokerProcess
from tests.support.form import pick
from tests.support.wait import until

ROOT = Path(__file__).parents[2]
CORES = (2, 1, 4)  # of a driver's first, second, third start


class Driver:
    """The process that runs the queries; `ensure` starts it again when it is dead."""

    def __init__(self, log: Path, **arguments: Any) -> None:
        self._arguments = arguments
        self._cores = cycle(CORES)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def ensure(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            self.kill()  # a JVM may have outlived its Python
            self.starts += 1
            arguments = json.dumps({**self._arguments, "cores": next(self._cores)})
            command = [sys.executable, "-m", "tests.pipeline.kill_driver", arguments]
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=ENV)
            guard.watch(self._process.pid)
        return True

    def kill(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                kill_all([psutil.Process(self._process.pid)])
            self._process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text()[-6000:] if self._log.exists() else ""


class Consumer:
    """Consumes a queue whose messages are deleted as soon as they are acknowledged."""

    def __init__(self, url: str, queue: str) -> None:
        self._url, self._queue = url, queue
        self._stop = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._consume(),), daemon=True)
        self.messages: dict[str, tuple[str, int]] = {}  # by id: one may be delivered again

    def start(self) -> None:
        self._thread.start()

    async def _consume(self) -> None:
        async with Client(self._url) as client:
            while not self._stop.is_set():
                try:
                    for message in await client.pop(self._queue, batch=100, wait=1):
                        self.messages[message.id] = (message.partition, message.data)
                        await client.ack(message)
                except PenstockError:
                    await asyncio.sleep(0.1)  # the broker or PostgreSQL is being killed

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)

    def received(self) -> dict[str, list[int]]:
        return _by_partition(f"{partition}:{value}" for partition, value in self.messages.values())


class Flow:
    """Everything that runs, and what has come through it."""

    def __init__(
        self,
        cluster: Cluster,
        server: BrokerProcess,
        postgres: EmbeddedPostgres,
        directory: Path,
        total: int,
        retention: bool,
    ) -> None:
        self.tag, self.total, self.cluster, self.server = (
            uuid.uuid4().hex[:8],
            total,
            cluster,
            server,
        )
        self.postgres, self.directory = postgres, directory
        host, port = server.tcp
        self.tcp = f"{host}:{port}"
        self.driver = Driver(
            directory / "driver.log",
            broker=self.tcp,
            url=server.url,
            database=postgres.url,
            master=cluster.url,
            directory=str(directory),
            tag=self.tag,
            consumed=retention,
        )
        self.consumer = Consumer(server.url, f"mid-{self.tag}") if retention else None
        self._producer = threading.Thread(target=self._produce, daemon=True)
        self._stop = threading.Event()

    def __enter__(self) -> "Flow":
        with TopicLink(self.tcp, 30) as link:
            link.create(f"in-{self.tag}")
            link.create(f"out-{self.tag}")
        if self.consumer:
            options = {"completedRetentionSeconds": 1, "retentionEnabled": True, "leaseTime": 5}
            with BrokerCaller(self.server.url, patience=30) as caller:
                body = {"queue": f"mid-{self.tag}", "options": options}
                caller.json("POST", "/api/v1/configure", body)
            self.consumer.start()
        warm = {"queue": f"mid-{self.tag}", "partition": "warm", "payload": -1}
        PushLink(self.server.url, None, 30).push([json.dumps(warm).encode()], repeatable=False)
        self._producer.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self.driver.kill()
        self._producer.join(30)
        if self.consumer:
            self.consumer.stop()

    def _produce(self) -> None:
        """Steadily, as an idempotent producer: what the broker forgets while it is dead is sent
        again.
        """
        name = uuid.uuid4().bytes
        with TopicLink(self.tcp, 120) as link:
            for sequence, first in enumerate(range(0, self.total, 20)):
                payloads = [b"%d" % i for i in range(first, first + 20)]
                link.append(frames.produce_batch(f"in-{self.tag}", payloads, (name, sequence)))
                if self._stop.wait(0.02):
                    return

    def arrived(self) -> int:
        self.driver.ensure()
        with TopicLink(self.tcp, 60) as link:
            return link.info(f"out-{self.tag}").next_offset

    def wait_for(self, count: int) -> None:
        until(
            lambda: self.arrived() >= count,
            600,
            f"{count} records of {self.total}: {self.driver.log}",
        )

    def kill(self, victim: str) -> None:
        if victim == "driver":
            self.driver.kill()
        elif victim == "broker":
            self.server.kill()
            time.sleep(0.2)
            self.server.start()
        elif victim == "postgres":
            os.kill(self.postgres.pid(), signal.SIGKILL)
            time.sleep(0.2)
            self.postgres.start()
        else:
            find = self.cluster.executors if victim == "executor" else self.cluster.python_workers

            def one() -> bool:
                # When everything has arrived already, Spark may have let its idle workers go: there
                # is none to kill.
                if not (result := find()):
                    return victim == "worker" and self.arrived() >= self.total
                kill_all([random.choice(result)])
                return True

            until(
                lambda: self.driver.ensure() and one(), 600, f"a living {victim}: {self.driver.log}"
            )


@pytest.mark.timeout(7000)
@pytest.mark.spark
@pytest.mark.parametrize("retention", pick(short=[False], usual=[False], soak=[False, True]))
def test_every_record_arrives_once_and_in_order_whatever_is_killed(
    own_postgres, scratch, tmp_path, cluster, soak, retention
) -> None:
    each = ["executor", "driver", "broker", "worker", "postgres"]
    victims = [*each, *random.choices(each, k=15)] if soak else each[:3]
    total = 6000 if soak else 300
    url = own_postgres.url
    settings = {"queues__retention_interval": "200ms"} if retention else {}
    with (
        BrokerProcess(scratch / "data", database_url=url, **settings) as server,
        Flow(cluster, server, own_postgres, tmp_path, total, retention) as flow,
    ):
        flow.wait_for(1)
        for number, victim in enumerate(victims):
            flow.wait_for(1 + total * (number + 1) // (len(victims) + 2))
            flow.kill(victim)
        rows = total if retention else total + 1  # the first message was pushed into the queue
        flow.wait_for(rows)
        lake = tmp_path / "lake"
        until(
            lambda: flow.arrived() and len(_stored(lake)) >= rows,
            600,
            f"all in Parquet: {flow.driver.log}",
        )
        if consumer := flow.consumer:
            until(
                lambda: flow.arrived() and len(consumer.messages) > total,
                600,
                f"all messages consumed: {flow.driver.log}",
            )
        flow.driver.kill()
        made = {f"p{k}": list(range(k, total, 3)) for k in range(3)}
        in_queue = {"warm": [-1], **made}
        if consumer:
            assert consumer.received() == in_queue
        else:
            assert _queue(url, flow.tag) == in_queue
        topic = [
            row["payload"].decode() for row in batch_rows(broker=flow.tcp, topic=f"out-{flow.tag}")
        ]
        assert _by_partition(topic) == (made if retention else in_queue)
        assert _stored(lake) == [(offset, text.encode()) for offset, text in enumerate(topic)]


def _stored(lake: Path) -> list[tuple[int, bytes]]:
    """Offsets and payloads in the files that Spark has committed, which its log names."""
    files = set()
    for batch in lake.glob("_spark_metadata/[0-9]*"):
        entries = map(json.loads, batch.read_text().splitlines()[1:])
        files |= {urlsplit(one["path"]).path for one in entries if one["action"] == "add"}
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return sorted((row["offset"], row["payload"]) for row in rows)


def _queue(url: str, tag: str) -> dict[str, list[int]]:
    from penstock.pipeline.sources.queue import QueueReader

    reader = QueueReader(options(url, f"mid-{tag}", streaming=False))
    rows = sorted(
        rows_of(reader, reader.partitions()), key=lambda row: (row["partition"], row["seq"])
    )
    return _by_partition(f"{row['partition']}:{row['payload']}" for row in rows)


def _by_partition(texts: Iterable[str]) -> dict[str, list[int]]:
    collected: dict[str, list[int]] = defaultdict(list)
    for text in texts:
        partition, _, value = text.partition(":")
        collected[partition].append(int(value))
    return dict(collected)
