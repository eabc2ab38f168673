"""Record batches and the Kafka listener.

PRODUCE into topics with record batches beside Redis Streams and NATS JetStream, equally durable;
CPU of the broker per record with confluent-kafka at its own batch sizes; bytes per second of Fetch
against FETCH. The server runs in a process of its own, as in `bench.topics`; what it costs is the CPU time that the
kernel counts for it.
"""

import asyncio
import json
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import confluent_kafka
import uvloop

from bench.harness import Contest, Figure, spread
from bench.peer import logs
from bench.peer.logs import Log, Missing
from bench.peer.rounds import Match, cpu_of
from bench.topics import connect, fetch_all, process, receive, scratch
from penstock.config.schema import KafkaServerSettings as KafkaSettings
from penstock.config.schema import TcpServerSettings as TcpSettings
from penstock.config.schema import TopicsSettings as TopicSettings
from penstock.metrics import Metrics
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore
from penstock.wire.kafka import KafkaServer
from penstock.wire.tcp import TcpServer

VALUE = b"x" * 200
RECORDS = 500_000
CPU_PER_RECORD = 0.3  # microseconds
FETCHED = 400 << 20
PER_BATCH = 500
ROUNDS = 3
SYNC_INTERVAL = 1.0  # with fsync `interval`: as long as that of Redis with `everysec`
DEPTHS = (1, 16, 64, 256)
WAIT, NO_WAIT = "fsync before the answer", "no fsync before the answer"
TARGETS = {  # against Redis, by how many are in flight
    WAIT: {1: 0.7, 16: 0.85, 64: 1.5, 256: 2.5},
    NO_WAIT: {1: 0.75, 16: 0.9, 64: 1.2, 256: 2.9},
}
# our own setting of fsync, and the peers with theirs
LOGS: dict[str, tuple[str, list[tuple[str, Callable[[], AbstractContextManager[Log]]]]]] = {
    WAIT: ("group", [("Redis Streams, appendfsync always", partial(logs.redis, "always"))]),
    NO_WAIT: (
        "interval",
        [
            ("Redis Streams, appendfsync everysec", partial(logs.redis, "everysec")),
            ("NATS JetStream on disk, default sync", logs.nats),
        ],
    ),
}


async def serve(directory: Path, fsync: Any) -> None:
    """What the child process runs: topics with record batches, over Kafka and TCP."""
    metrics = Metrics()
    settings = TopicSettings(fsync=fsync, format="kafka")
    pool = ThreadPoolExecutor(2)
    topics = TopicStore(directory, settings, pool=pool, metrics=metrics)
    await topics.start()
    groups = Groups(directory / ".penstock" / "groups", topics, pool=pool, metrics=metrics)
    await groups.start()
    kafka = KafkaServer(KafkaSettings(port=0), topics, groups, metrics)
    tcp = TcpServer(TcpSettings(port=0), topics, groups, metrics)
    aiq = await topics.create("aiq", form="aiq")
    kept = await topics.create("bench", form="kafka")
    values = [VALUE] * PER_BATCH
    while aiq.size_bytes < FETCHED:
        await aiq.append(values)
    while kept.size_bytes < FETCHED:
        await kept.append(values)
    for server in (kafka, tcp):
        await server.start()
    print(json.dumps({"kafka": kafka.port, "tcp": tcp.port}), flush=True)
    await asyncio.Event().wait()


@contextmanager
def penstock(fsync: str) -> Iterator[tuple[dict[str, int], int]]:
    """Run the child process; yield its ports and its process id."""
    with scratch() as directory:
        command = (sys.executable, "-m", "bench.kafka", str(directory), fsync)
        with process(*command, stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            ports = json.loads(running.stdout.readline())
            yield ports, running.pid


def produce(port: int, topic: str, count: int = RECORDS) -> None:
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": f"127.0.0.1:{port}",
            "queue.buffering.max.messages": 2 * RECORDS,
            "log_level": 0,
        }
    )
    failed: list[Any] = []

    def note(error: Any, _: Any) -> None:
        if error is not None:
            failed.append(error)

    for _ in range(count):
        producer.produce(topic, VALUE, on_delivery=note)
        producer.poll(0)
    assert producer.flush(300) == 0
    assert not failed, failed[:3]


def consume(port: int, topic: str, count: int = RECORDS) -> None:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": f"127.0.0.1:{port}", "group.id": "bench", "log_level": 0}
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    seen = 0
    while seen < count:
        seen += sum(1 for one in consumer.consume(10_000, 5) if not one.error())
    consumer.close()


def cpu_figures() -> Iterable[Figure]:
    """Broker CPU per record, produced and consumed by confluent-kafka."""
    with penstock("group") as (ports, server):
        for name, work in (("produces", produce), ("consumes", consume)):
            costs, rates = [], []
            for number in range(ROUNDS):
                topic = f"cpu-{number}"
                if work is produce:
                    produce(ports["kafka"], topic, 1000)
                before, began = cpu_of(server), time.perf_counter()
                work(ports["kafka"], topic)
                costs.append((cpu_of(server) - before) / RECORDS * 1e6)
                rates.append(RECORDS / (time.perf_counter() - began))
            cost = statistics.median(costs)
            yield Figure(
                f"confluent-kafka {name} 200-byte records: CPU of the broker",
                cost,
                "us/record",
                target=f"≤ {CPU_PER_RECORD} us",
                met=cost <= CPU_PER_RECORD,
                spread=spread(costs),
                note=f"{statistics.median(rates):,.0f} records/s",
                detail={"costs": costs, "rates": rates},
            )


def fetch_request(offset: int) -> bytes:
    """Fetch version 11 of a megabyte from partition 0."""
    name = b"bench"
    body = struct.pack(">hhih", 1, 11, 1, -1)
    body += struct.pack(">iiiibiii", -1, 0, 1, 4 << 20, 0, 0, -1, 1)
    body += struct.pack(">h", len(name)) + name
    body += struct.pack(">iiiqqi", 1, 0, -1, offset, -1, 1 << 20)
    body += struct.pack(">ih", 0, 0)
    return struct.pack(">i", len(body)) + body


def fetch_rate(connection: socket.socket) -> float:
    """GB/s of Fetch from the beginning to the end of the topic."""
    size, offset = 0, 0
    buffer = memoryview(bytearray(8 << 20))  # of one answer
    began = time.perf_counter()
    while True:
        connection.sendall(fetch_request(offset))
        (length,) = struct.unpack(">i", receive(connection, 4))
        filled = 0
        while filled < length:
            filled += connection.recv_into(buffer[filled:length])
        (records,) = struct.unpack_from(">i", buffer, 67)
        if not records:
            return size / (time.perf_counter() - began) / 1e9
        size += length
        offset = _end(buffer[71 : 71 + records])


def _end(batches: memoryview) -> int:
    """The offset after the last of these batches."""
    at, end = 0, 0
    while at < len(batches):
        base, length = struct.unpack_from(">qi", batches, at)
        (last,) = struct.unpack_from(">i", batches, at + 23)
        end = base + last + 1
        at += 12 + length
    return end


def fetch_figures() -> Iterable[Figure]:
    with penstock("never") as (ports, _), connect(ports["kafka"]) as connection:

        def tcp() -> float:
            began = time.perf_counter()
            size, _ = uvloop.run(fetch_all(ports["tcp"], False, "aiq"))
            return size / (time.perf_counter() - began) / 1e9

        yield Contest(
            "Fetch of record batches, bytes per second",
            "GB/s",
            lambda: fetch_rate(connection),
            tcp,
            "FETCH of aiq's layout over TCP",
            at_least=0.9,
        ).run()


def produce_figures() -> Iterable[Figure]:
    """Single records over TCP into record batches, by how many are in flight."""
    for part, (fsync, peers) in LOGS.items():
        for name, peer in peers:
            with ExitStack() as stack:
                try:
                    theirs = stack.enter_context(peer())
                except Missing as error:
                    print(f"  left out: {name}: {error}")
                    continue
                ours = stack.enter_context(logs.penstock(fsync, "kafka", SYNC_INTERVAL))
                for depth in DEPTHS:
                    yield Match(
                        f"PRODUCE into record batches, {part}: {depth} in flight",
                        ours=partial(ours.append, depth),
                        theirs=partial(theirs.append, depth),
                        against=name,
                        at_least=TARGETS[part][depth] if name.startswith("Redis") else None,
                    ).run()


def figures() -> Iterable[Figure]:
    yield from produce_figures()
    yield from cpu_figures()
    yield from fetch_figures()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), sys.argv[2]))
