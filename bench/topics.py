"""Topics end to end: the server in a process of its own, this process as the one client, 100-byte
payloads.

Peers (Redis, NATS) are the distribution's packages, driven by equally thin clients: raw sockets,
requests prepared once, answers only counted. They are installed with apt-get when they are missing
and we may; otherwise they are skipped with a note.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import uvloop

from bench.harness import Contest, Figure, percentile, spread
from penstock.client import Client
from penstock.config.schema import HttpServerSettings as HttpSettings
from penstock.config.schema import TcpServerSettings as TcpSettings
from penstock.config.schema import TopicsSettings as TopicSettings
from penstock.config.schema import WebsocketServerSettings as WebsocketSettings
from penstock.metrics import Metrics
from penstock.protocol import frames
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore
from penstock.wire.feed import Feeds
from penstock.wire.http.api.topics import TopicsApi
from penstock.wire.http.routes import Router, routes_of
from penstock.wire.http.server import HttpServer
from penstock.wire.tcp import TcpServer
from penstock.wire.websocket import WebsocketServer
from tests.support import guard

PAYLOAD = b"x" * 100
SYNC_INTERVAL = 0.1
BATCH, BATCHES, WINDOW = 1000, 1500, 8
SINGLES, IN_FLIGHT = 192_000, 64
FETCH_BYTES = 600 << 20
SUBSCRIBERS, RATE, SECONDS = 100, 1000, 5


# -- servers
# --------------------------------------------------------------------------------------------------------


async def serve(
    directory: Path, fsync: Any, form: Any = "aiq", interval: float | str = SYNC_INTERVAL
) -> None:
    """What the child process runs: topics and everything that serves them, nothing else."""
    metrics = Metrics()
    pool = ThreadPoolExecutor(2)
    settings = TopicSettings(fsync=fsync, fsync_interval=float(interval), format=form)
    topics = TopicStore(directory, settings, pool=pool, metrics=metrics)
    await topics.start()
    groups = Groups(directory / ".penstock" / "groups", topics, pool=pool, metrics=metrics)
    await groups.start()
    feeds = Feeds()
    tcp = TcpServer(TcpSettings(port=0), topics, groups, metrics)
    http = HttpServer(
        Router(routes_of(TopicsApi(topics, groups, feeds, None))),
        HttpSettings(port=0),
        metrics=metrics,
    )
    websocket = WebsocketServer(WebsocketSettings(port=0), topics, feeds, metrics)
    for server in (tcp, http, websocket):
        await server.start()
    print(json.dumps({"tcp": tcp.port, "http": http.port, "websocket": websocket.port}), flush=True)
    await asyncio.Event().wait()


@contextmanager
def process(*command: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    running = subprocess.Popen(command, text=True, **options)
    guard.watch(running.pid)
    try:
        yield running
    finally:
        running.terminate()
        running.wait()


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        yield Path(directory)


@contextmanager
def penstock(fsync: str, form: str = "aiq") -> Iterator[dict[str, int]]:
    with scratch() as directory:
        command = (sys.executable, "-m", "bench.topics", str(directory), fsync, form)
        with process(*command, stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            yield json.loads(running.stdout.readline())


def install(program: str, package: str) -> str | None:
    """The program's path; installed if need be and possible."""
    program_path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/bin")
    if program_path is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(
            ["apt-get", "install", "-y", "--no-install-recommends", package],
            capture_output=True,
            check=False,
        )
        program_path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/bin")
    return program_path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def connect(port: int, patience: float = 20.0) -> socket.socket:
    deadline = time.monotonic() + patience
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


# -- producing
# ------------------------------------------------------------------------------------------------------


def receive(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 16))
        if not part:
            raise ConnectionError("the server closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def rounds_of(
    connection: socket.socket, message: bytes, answer_size: int, rounds: int, window: int
) -> float:
    """Seconds for `rounds` messages with `window` of them in flight; every answer has `answer_size`
    bytes.
    """
    started = time.perf_counter()
    sent = answered = 0
    while answered < rounds:
        while sent < rounds and sent - answered < window:
            connection.sendall(message)
            sent += 1
        receive(connection, answer_size)
        answered += 1
    return time.perf_counter() - started


def checked(answer: bytes, command: int) -> None:
    if answer[:2] != bytes((command, 0)):
        raise AssertionError(f"unexpected answer {answer[:64]!r}")


def batches(connection: socket.socket) -> float:
    """PRODUCE_BATCH of 1000, records per second."""
    frame = b"".join(frames.produce_batch("bench", [PAYLOAD] * BATCH))
    connection.sendall(frame)
    checked(receive(connection, 18), 0x86)
    return BATCH * BATCHES / rounds_of(connection, frame, 18, BATCHES, WINDOW)


def bare_records() -> float:
    """The same records written one by one to a buffered file by nothing but a loop, with an fsync
    at the same rate.
    """
    pack = struct.Struct("<QI").pack
    with scratch() as directory, (directory / "data.log").open("ab", buffering=1 << 20) as target:
        started = synced = time.perf_counter()
        for batch in range(BATCHES):
            for offset in range(batch * BATCH, (batch + 1) * BATCH):
                target.write(pack(offset, len(PAYLOAD)) + PAYLOAD)
            if time.perf_counter() - synced > SYNC_INTERVAL:
                target.flush()
                os.fdatasync(target.fileno())
                synced = time.perf_counter()
        target.flush()
        os.fdatasync(target.fileno())
        return BATCH * BATCHES / (time.perf_counter() - started)


def bare_blocks() -> float:
    """The same bytes written a prepared batch at a time: what the file system alone can do."""
    record = struct.pack("<QI", 0, len(PAYLOAD)) + PAYLOAD
    block = record * BATCH
    with scratch() as directory:
        target = os.open(directory / "data.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        try:
            started = synced = time.perf_counter()
            for _ in range(BATCHES):
                os.write(target, block)
                if time.perf_counter() - synced > SYNC_INTERVAL:
                    os.fdatasync(target)
                    synced = time.perf_counter()
            os.fdatasync(target)
            return BATCH * BATCHES / (time.perf_counter() - started)
        finally:
            os.close(target)


def singles(connection: socket.socket) -> float:
    """Single PRODUCEs, 64 in flight on one connection: records per second."""
    frame = frames.produce("bench", PAYLOAD)
    connection.sendall(frame)
    checked(receive(connection, 14), 0x81)
    took = rounds_of(connection, frame * IN_FLIGHT, 14 * IN_FLIGHT, SINGLES // IN_FLIGHT, 1)
    return SINGLES / took


def redis_singles(connection: socket.socket) -> float:
    """XADD, 64 pipelined."""
    parts = [b"XADD", b"bench", b"*", b"p", PAYLOAD]
    command = b"*%d\r\n" % len(parts) + b"".join(
        b"$%d\r\n%b\r\n" % (len(part), part) for part in parts
    )
    connection.sendall(b"*2\r\n$3\r\nDEL\r\n$5\r\nbench\r\n")
    connection.recv(100)
    message = command * IN_FLIGHT
    rounds = SINGLES // IN_FLIGHT
    started = time.perf_counter()
    for _ in range(rounds):
        connection.sendall(message)
        count = 0
        while count < 2 * IN_FLIGHT:  # an answer is $15\r\n<id>\r\n: two line ends each
            data = connection.recv(1 << 16)
            if not data or data.startswith(b"-"):
                raise AssertionError(f"unexpected answer {data[:100]!r}")
            count += data.count(b"\n")
    return SINGLES / (time.perf_counter() - started)


def nats_singles(connection: socket.socket) -> float:
    """Publishes to a JetStream stream on disk, 64 unacknowledged at most."""
    message = (b"PUB bench acks 100\r\n" + PAYLOAD + b"\r\n") * IN_FLIGHT
    rounds = SINGLES // IN_FLIGHT // 4
    started = time.perf_counter()
    for _ in range(rounds):
        connection.sendall(message)
        count = 0
        while count < IN_FLIGHT:
            data = connection.recv(1 << 16)
            if not data or b"-ERR" in data:
                raise AssertionError(f"unexpected answer {data[:100]!r}")
            count += data.count(b"}\r\n")
    return rounds * IN_FLIGHT / (time.perf_counter() - started)


@contextmanager
def redis() -> Iterator[Callable[[], float]]:
    program = install("redis-server", "redis-server")
    if program is None:
        raise FileNotFoundError("redis-server")
    port = free_port()
    options = [
        "--port",
        str(port),
        "--appendonly",
        "yes",
        "--appendfsync",
        "everysec",
        "--save",
        "",
    ]
    with (
        scratch() as directory,
        process(program, *options, "--dir", str(directory), stdout=subprocess.DEVNULL),
        connect(port) as connection,
    ):
        yield lambda: redis_singles(connection)


@contextmanager
def nats() -> Iterator[Callable[[], float]]:
    program = install("nats-server", "nats-server")
    if program is None:
        raise FileNotFoundError("nats-server")
    port = free_port()
    with (
        scratch() as directory,
        process(
            program,
            "-a",
            "127.0.0.1",
            "-p",
            str(port),
            "-js",
            "-sd",
            str(directory),
            stderr=subprocess.DEVNULL,
        ),
        connect(port) as connection,
    ):
        connection.recv(1 << 16)
        stream = b'{"name":"bench","subjects":["bench"],"storage":"file","retention":"limits","num_replicas":1}'
        connection.sendall(
            b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB made 1\r\nSUB acks 2\r\n'
        )
        connection.sendall(
            b"PUB $JS.API.STREAM.CREATE.bench made %d\r\n%b\r\n" % (len(stream), stream)
        )
        said = connection.recv(1 << 16)
        while not said.rstrip().endswith(b"}"):
            said += connection.recv(1 << 16)
        if b'"error"' in said:
            raise AssertionError(f"NATS refused the stream: {said!r}")
        yield lambda: nats_singles(connection)


def contests() -> Iterable[Contest]:
    with penstock("interval") as ports, connect(ports["tcp"]) as connection:
        for bare, name in (
            (bare_records, "bare Python loop over records: write, fdatasync every 100 ms"),
            (bare_blocks, "bare Python loop over prepared batches: write, fdatasync every 100 ms"),
        ):
            yield Contest(
                "PRODUCE_BATCH of 1000, fsync every 100 ms",
                "records/s",
                ours=lambda: batches(connection),
                theirs=bare,
                against=name,
                at_least=0.5,
            )
        for name, peer, note in (
            ("Redis Streams XADD, appendfsync everysec", redis, ""),
            ("NATS JetStream file storage, default sync", nats, ""),
        ):
            with ExitStack() as stack:
                try:
                    theirs = stack.enter_context(peer())
                except FileNotFoundError as error:
                    print(
                        f"  skipped: {name}: {error} is not installed and cannot be installed here"
                    )
                    continue
                yield Contest(
                    "PRODUCE, 64 in flight, fsync every 100 ms",
                    "records/s",
                    ours=lambda: singles(connection),
                    theirs=theirs,
                    against=name,
                    at_least=3.0,
                    note=note,
                )


# -- reading
# --------------------------------------------------------------------------------------------------------


async def fetch_all(port: int, decode: bool, topic: str = "bench") -> tuple[int, int]:
    size = records = 0
    async with (
        Client(topics=f"127.0.0.1:{port}") as client,
        client.topic(topic).reader(follow=False) as reader,
    ):
        async for batch in reader.batches():
            size += len(batch.raw)
            records += batch.to_arrow().num_rows if decode else batch.count
    return size, records


def fetch_figures() -> Iterable[Figure]:
    with penstock("never") as ports, connect(ports["tcp"]) as connection:
        frame = b"".join(frames.produce_batch("bench", [PAYLOAD] * BATCH))
        rounds_of(connection, frame, 18, FETCH_BYTES // (112 * BATCH), WINDOW)
        for decode, name in (
            (False, "FETCH, raw log to one client"),
            (True, "FETCH and decode into Arrow"),
        ):
            rates = []
            for _ in range(5):
                started = time.perf_counter()
                size, _ = uvloop.run(fetch_all(ports["tcp"], decode))
                rates.append(size / (time.perf_counter() - started) / 1e9)
            value = statistics.median(rates)
            yield Figure(
                name,
                value,
                "GB/s",
                target="" if decode else "≥ 1 GB/s",
                met=None if decode else value >= 1.0,
                spread=spread(rates),
                detail={"rates": rates},
            )


# -- fan-out
# --------------------------------------------------------------------------------------------------------


class Subscriber(asyncio.Protocol):
    """Finds the times in what is pushed to it; how a record is wrapped does not matter."""

    def __init__(self, hello: bytes, latencies: list[float]) -> None:
        self._hello, self._latencies = hello, latencies
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._hello)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter_ns()
        pieces = (self._rest + data).split(b"@")
        self._rest = pieces[-1] if len(pieces) % 2 else b"@" + pieces[-1]
        if len(pieces) % 2 == 0:
            pieces.pop()
        for place in range(1, len(pieces), 2):
            self._latencies.append((now - int(pieces[place])) / 1e6)


SSE_HELLO = b"GET /topics/bench/stream?offset=latest HTTP/1.1\r\nHost: localhost\r\n\r\n"


def websocket_hello() -> bytes:
    subscribe = b'{"command":"subscribe_topic_request","topic":"bench","start_offset":"latest"}'
    return (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ) + (bytes((0x81, 0x80 | len(subscribe), 0, 0, 0, 0)) + subscribe)


async def fan_out(tcp: int, port: int, hello: bytes) -> list[float]:
    """Milliseconds from sending a record to its arrival at each subscriber."""
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    producer, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", tcp)
    producer.write(frames.request(frames.Command.CREATE_TOPIC, frames.name("bench")))
    await asyncio.sleep(0.2)
    for _ in range(SUBSCRIBERS):
        await loop.create_connection(lambda: Subscriber(hello, latencies), "127.0.0.1", port)
    await asyncio.sleep(0.5)
    begin = time.perf_counter()
    for number in range(RATE * SECONDS):
        wait = begin + number / RATE - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        stamp = b"@%d@" % time.perf_counter_ns()
        producer.write(frames.produce("bench", stamp.ljust(100, b".")))
    expected = RATE * SECONDS * SUBSCRIBERS
    for _ in range(200):
        if len(latencies) >= expected:
            break
        await asyncio.sleep(0.05)
    if len(latencies) != expected:
        raise AssertionError(f"{len(latencies)} deliveries instead of {expected}")
    return latencies


def fan_out_figures() -> Iterable[Figure]:
    for name, kind, hello in (
        ("SSE", "http", SSE_HELLO),
        ("WebSocket", "websocket", websocket_hello()),
    ):
        with penstock("interval") as ports:
            latencies = uvloop.run(fan_out(ports["tcp"], ports[kind], hello))
        value = percentile(latencies, 0.99)
        yield Figure(
            f"{name} fan-out: {SUBSCRIBERS} subscribers, {RATE} records/s, p99 from send to delivery",
            value,
            "ms",
            target="< 10 ms",
            met=value < 10,
            detail={
                "p50": percentile(latencies, 0.5),
                "p999": percentile(latencies, 0.999),
                "max": max(latencies),
            },
        )


def batch_figures() -> Iterable[Figure]:
    with penstock("interval") as ports, connect(ports["tcp"]) as connection:
        rates = [batches(connection) for _ in range(5)]
    value = statistics.median(rates)
    yield Figure(
        "PRODUCE_BATCH of 1000, fsync every 100 ms",
        value,
        "records/s",
        target="≥ 500,000",
        met=value >= 500_000,
        spread=spread(rates),
        detail={"rates": rates},
    )


CONSUMED, CONSUME_RECORDS, CONSUME_SIZE = 100_000, 100, 300  # in all, per request, bytes each
READS_IN_FLIGHT = 4
# A server of the bare socket: for each read of requests, their answers' worth of bytes.
BARE_SERVER = """
import socket, sys
answer = bytes(int(sys.argv[2]))
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
connection, _ = listener.accept()
while connection.recv(1 << 16):
    connection.sendall(answer)
"""


def read_rate(connection: socket.socket, requests: list[bytes], answer_size: int) -> float:
    """Records per second, four requests in flight; every answer has `answer_size` bytes."""
    started = time.perf_counter()
    for place in range(0, len(requests), READS_IN_FLIGHT):
        connection.sendall(b"".join(requests[place : place + READS_IN_FLIGHT]))
        receive(connection, READS_IN_FLIGHT * answer_size)
    return CONSUMED / (time.perf_counter() - started)


@contextmanager
def consuming() -> Iterator[Callable[[], float]]:
    """CONSUME, the command of the original's clients."""
    with penstock("never") as ports, connect(ports["tcp"]) as connection:
        frame = b"".join(frames.produce_batch("bench", [bytes(CONSUME_SIZE)] * BATCH))
        rounds_of(connection, frame, 18, CONSUMED // BATCH, WINDOW)
        requests = [
            frames.request(
                frames.Command.CONSUME,
                frames.name("bench") + frames.CONSUME_REQUEST.pack(offset, CONSUME_RECORDS),
            )
            for offset in range(0, CONSUMED, CONSUME_RECORDS)
        ]
        size = 10 + CONSUME_RECORDS * (12 + CONSUME_SIZE)
        connection.sendall(requests[0])
        checked(receive(connection, size), 0x82)
        yield lambda: read_rate(connection, requests, size)


@contextmanager
def redis_reading() -> Iterator[Callable[[], float]]:
    """XRANGE of a stream with the same records, from an id that is known."""
    program, port = install("redis-server", "redis-server"), free_port()
    if program is None:
        raise FileNotFoundError("redis-server")
    options = ["--port", str(port), "--appendonly", "no", "--save", ""]
    with (
        scratch() as directory,
        process(program, *options, "--dir", str(directory), stdout=subprocess.DEVNULL),
        connect(port) as connection,
    ):
        first = 1_000_000  # ids of one length, so that answers have one
        for offset in range(first, first + CONSUMED, BATCH):
            adds = (
                _resp(b"XADD", b"bench", b"%d-0" % number, b"p", bytes(CONSUME_SIZE))
                for number in range(offset, offset + BATCH)
            )
            connection.sendall(b"".join(adds))
            receive(connection, BATCH * 15)  # $9, the id, line ends
        requests = [
            _resp(b"XRANGE", b"bench", b"%d-0" % offset, b"+", b"COUNT", b"%d" % CONSUME_RECORDS)
            for offset in range(first, first + CONSUMED, CONSUME_RECORDS)
        ]
        record = b"*2\r\n$9\r\n1000000-0\r\n*2\r\n$1\r\np\r\n$%d\r\n\r\n" % CONSUME_SIZE
        size = len(b"*%d\r\n" % CONSUME_RECORDS) + CONSUME_RECORDS * (len(record) + CONSUME_SIZE)
        yield lambda: read_rate(connection, requests, size)


@contextmanager
def bare_reading() -> Iterator[Callable[[], float]]:
    """As many bytes from a program that does nothing else: the floor of one connection."""
    port, size = free_port(), 10 + CONSUME_RECORDS * (12 + CONSUME_SIZE)
    command = (sys.executable, "-c", BARE_SERVER, str(port), str(READS_IN_FLIGHT * size))
    with process(*command), connect(port) as connection:
        requests = [bytes(20)] * (CONSUMED // CONSUME_RECORDS)
        yield lambda: read_rate(connection, requests, size)


def _resp(*parts: bytes) -> bytes:
    body = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"*%d\r\n" % len(parts) + body


def consume_figures() -> Iterable[Figure]:
    sides: dict[str, Any] = {"Redis XRANGE": redis_reading, "a bare socket": bare_reading}
    with ExitStack() as stack:
        ours, theirs = stack.enter_context(consuming()), {}
        for name, side in sides.items():
            try:
                theirs[name] = stack.enter_context(side())
            except FileNotFoundError as missing:
                print(f"{name} is left out: no {missing}")
        rates: dict[str, list[float]] = {name: [] for name in ("", *theirs)}
        for _ in range(7):
            for name, once in (("", ours), *theirs.items()):
                rates[name].append(once())
    value = statistics.median(rates[""])
    for name in theirs:
        peer = statistics.median(rates[name])
        yield Figure(
            f"CONSUME, {CONSUME_RECORDS} records of {CONSUME_SIZE} bytes per request,"
            f" {READS_IN_FLIGHT} in flight, against {name}",
            value,
            "records/s",
            against=name,
            against_value=peer,
            ratio=value / peer,
            spread=spread(rates[""]),
            detail={"rates": rates[""], "theirs": rates[name]},
        )


def figures() -> Iterable[Figure]:
    yield from batch_figures()
    yield from consume_figures()
    yield from fetch_figures()
    yield from fan_out_figures()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(Path(sys.argv[1]), *sys.argv[2:]))
