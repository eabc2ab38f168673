"""Export: how fast a send queue takes blocks, how fast it starts, and a route end to end against a
plain loop.

The destination is a small HTTP server in a process of its own, the same for both sides. The plain
loop is what one writes first: read records from the topic, POST them with httpx, commit the offset,
again. It is there twice: as a program beside a broker, and inside the broker with its own reader,
which no user can have.
"""

import asyncio
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from random import Random
from typing import Any

import httptools
import httpx
import uvloop

from bench.harness import Contest, Figure
from penstock.config import Config
from penstock.config.schema import SendQueueSettings, TopicsSettings
from penstock.export.context import Clock, RouteContext
from penstock.export.manager import Exports
from penstock.export.payload import SNAPPY, compress
from penstock.export.sendqueue import SendQueue as Queue
from penstock.export.sendqueue.blocks import Block
from penstock.export.sendqueue.chunks import ChunkOptions
from penstock.export.sendqueue.fastqueue import FastQueue
from penstock.export.sendqueue.store import compress_blocks
from penstock.export.telemetry import ExportMetrics
from penstock.io.fs import DISK
from penstock.metrics import Metrics
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore
from tests.support.broker import ServeProcess

BLOCKS, BLOCK = 300_000, 1024
SPILL_BLOCKS, SPILL_BLOCK, PUSH = 4000, 64 << 10, 64
RECORDS, RECORD, BATCH = 300_000, 100, 1000
GIB = 1 << 30
CHUNK = 128 << 20  # what the default max_bytes of 1 GiB gives


@contextmanager
def scratch() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def run(body: Coroutine[Any, Any, float]) -> float:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(body)


def text(size: int, seed: int = 1) -> bytes:
    """About as compressible as JSON telemetry: snappy makes it roughly a third."""
    random = Random(seed)
    words = [
        b'"name": "',
        b'"value": ',
        b'"host": "web-',
        b'"region": "eu-central-1", ',
        b'"status": 200, ',
    ]
    parts, length = [], 0
    while length < size:
        part = random.choice(words) + b"%d" % random.randrange(100_000) + b'", '
        parts.append(part)
        length += len(part)
    return b"".join(parts)[:size]


def push_memory() -> float:
    """Blocks per second into the memory layer of a route's send queue, 1000 to a push: limits,
    numbers and books.
    """

    async def body() -> float:
        with ThreadPoolExecutor(1) as pool, scratch() as directory:
            settings = SendQueueSettings(
                fsync="never",
                max_size=2 * BLOCKS,
                max_bytes=1 << 40,
                inmemory_blocks=2 * BLOCKS,
                memory_percent=0.0,
            )
            process = Metrics()
            metrics = ExportMetrics(process, dict).of("r")
            limit = asyncio.Semaphore(1)
            context = RouteContext(fs=DISK, pool=pool, clock=Clock(), limit=limit, metrics=process)
            queue = Queue("r", settings, directory, context, metrics, limit=1 << 40)
            await queue.start()
            payload = text(BLOCK)
            began = time.perf_counter()
            for _ in range(BLOCKS // 1000):
                await queue.push([Block(payload, 1) for _ in range(1000)])
            took = time.perf_counter() - began
            assert len(queue._fast.memory) == BLOCKS
            queue._fast.abandon()
            return BLOCKS / took

    return run(body())


def log_lines(size: int, seed: int = 1) -> bytes:
    """JSON log lines as services write them: snappy makes them roughly a fifth."""
    random, lines, length, at = Random(seed), [], 0, 1_700_000_000_000
    while length < size:
        at += random.randrange(50)
        line = {
            "timestamp": at,
            "service": random.choice(["checkout", "cart", "search", "auth"]),
            "host": f"web-{random.randrange(40):02d}.eu-central-1.example.com",
            "level": random.choice(["INFO", "INFO", "INFO", "WARN"]),
            "message": "request finished",
            "http": {"method": "GET", "path": f"/orders/{random.randrange(10**6)}", "status": 200},
            "duration_ms": round(random.random() * 100, 2),
            "trace_id": f"{random.getrandbits(64):016x}",
        }
        lines.append(json.dumps(line).encode() + b"\n")
        length += len(lines[-1])
    return b"".join(lines)[:size]


Data = Callable[[int, int], bytes]


def spill(data: Data = text, *, compressed: bool = False) -> float:
    """Bytes on disk per second, from pushes: compression (unless `compressed` before), framing,
    checksums, writing.
    """

    async def body() -> float:
        with ThreadPoolExecutor(os.cpu_count()) as pool, scratch() as directory:
            options = ChunkOptions(
                fsync="never", write_through=False, inmemory_blocks=256, compression=SNAPPY
            )
            queue = FastQueue(DISK, directory, options, pool)
            await queue.open()
            blocks = made_blocks(data, compressed)
            began = time.perf_counter()
            for at in range(0, SPILL_BLOCKS, PUSH):
                await queue.put(blocks[at : at + PUSH])
            await queue._writer.spill()
            took = time.perf_counter() - began
            size = queue.disk_bytes
            queue.abandon()
            return size / took

    return run(body())


def made_blocks(data: Data, compressed: bool) -> list[Block]:
    made = [Block(data(SPILL_BLOCK, seed), 1) for seed in range(16)]
    if compressed:
        compress_blocks(made, SNAPPY)
    return [copy(made[n % 16]) for n in range(SPILL_BLOCKS)]


def push_durably(data: Data = text) -> float:
    """Bytes on disk per second, each push compressed, framed, checksummed and synced before it is
    answered, by four who push: how a route is run."""

    async def body() -> float:
        with ThreadPoolExecutor(os.cpu_count()) as pool, scratch() as directory:
            queue = FastQueue(
                DISK,
                directory,
                ChunkOptions(fsync="always", inmemory_blocks=256, compression=SNAPPY),
                pool,
            )
            await queue.open()
            blocks = made_blocks(data, compressed=False)

            async def pusher(first: int) -> None:
                for at in range(first * PUSH, SPILL_BLOCKS, 4 * PUSH):
                    await queue.put(blocks[at : at + PUSH])

            began = time.perf_counter()
            await asyncio.gather(*map(pusher, range(4)))
            took = time.perf_counter() - began
            size = queue.disk_bytes
            queue.abandon()
            return size / took

    return run(body())


def write_sequentially(data: Data = text, *, durably: bool = False) -> float:
    """The same compressed bytes, compressed beforehand, written by one writer; `durably`: synced
    after each push's worth."""
    blocks = [compress(data(SPILL_BLOCK, seed), SNAPPY) for seed in range(16)]
    with scratch() as directory:
        size = 0
        began = time.perf_counter()
        with (directory / "plain").open("wb", buffering=256 << 10) as file:
            for number in range(SPILL_BLOCKS):
                size += file.write(blocks[number % 16])
                if durably and number % PUSH == PUSH - 1:
                    file.flush()
                    os.fdatasync(file.fileno())
        return size / (time.perf_counter() - began)


def compress_and_write() -> float:
    """Compressing and writing in turn, by one writer: what a spill cannot do without."""
    payloads = [text(SPILL_BLOCK, seed) for seed in range(16)]
    with scratch() as directory:
        size = 0
        began = time.perf_counter()
        with (directory / "plain").open("wb", buffering=256 << 10) as file:
            for number in range(SPILL_BLOCKS):
                size += file.write(compress(payloads[number % 16], SNAPPY))
        return size / (time.perf_counter() - began)


def fill(directory: Path, size: int, block: int, *, clean: bool) -> None:
    """A queue of `size` bytes on disk; `clean` False: left as a kill leaves it, its metadata as of
    the last tick, and some blocks delivered since."""

    async def body() -> float:
        with ThreadPoolExecutor(2) as pool:
            queue = FastQueue(
                DISK,
                directory,
                ChunkOptions(fsync="interval", inmemory_blocks=16, chunk_size=CHUNK),
                pool,
            )
            await queue.open()
            payload = os.urandom(block)
            written, ticked = 0, time.monotonic()
            while written < size:
                blocks = [Block(payload, 10) for _ in range(max(1, (8 << 20) // block))]
                await queue.put(blocks)
                written += len(blocks) * (block + 64)
                if time.monotonic() - ticked > 1:
                    await queue.tick()
                    ticked = time.monotonic()
            if clean:
                await queue.close()
            else:
                for _ in range(1000):
                    taken = await queue.take()
                    assert taken is not None
                    queue.ack(taken)
                await asyncio.sleep(0)  # the journal is written at the end of this turn of the loop
                queue.abandon()
        return 0.0

    run(body())


def start_time(directory: Path) -> float:
    """Milliseconds from nothing to the first block in hand."""

    async def body() -> float:
        with ThreadPoolExecutor(2) as pool:
            began = time.perf_counter()
            queue = FastQueue(
                DISK, directory, ChunkOptions(fsync="interval", chunk_size=CHUNK), pool
            )
            await queue.open()
            assert await queue.take() is not None
            took = time.perf_counter() - began
            queue.abandon()
            return took * 1000

    return run(body())


class Sink(asyncio.Protocol):
    """Takes requests, counts their bodies' bytes, says 200."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")  # type: ignore[attr-defined]


def serve(ready: Any) -> None:
    async def body() -> None:
        server = await asyncio.get_running_loop().create_server(Sink, "127.0.0.1", 0)
        ready.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())


@contextmanager
def sink() -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    ready: Any = context.Queue()
    process = context.Process(target=serve, args=(ready,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ready.get(timeout=30)}/in"
    finally:
        process.terminate()
        process.join()


class Topic:
    """A topic with records in it, made once and read by both sides."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
        self.turn = 0

        async def make() -> float:
            with ThreadPoolExecutor(2) as pool:
                store = self.store(pool)
                await store.start()
                topic = await store.create("orders")
                record = json.dumps({"id": 1, "pad": "x" * (RECORD - 19)}).encode()
                for _ in range(RECORDS // BATCH):
                    await topic.append([record] * BATCH)
                await store.stop()
            return 0.0

        run(make())

    def store(self, pool: ThreadPoolExecutor) -> TopicStore:
        return TopicStore(self.directory / "topics", TopicsSettings(), pool=pool, metrics=Metrics())

    def close(self) -> None:
        shutil.rmtree(self.directory)

    def export(self, url: str, **target: Any) -> Callable[[], float]:
        """Records per second by a route, from its start until the last one is delivered and on the
        books.
        """

        async def body() -> float:
            self.turn += 1
            with ThreadPoolExecutor(2) as pool:
                store = self.store(pool)
                await store.start()
                route = {
                    "source": {"topic": "orders"},
                    "destination": {"type": "http", "url": url, **target},
                    "batch": {"records": BATCH, "linger": 0},
                }
                config = Config(
                    data_directory=self.directory / f"run{self.turn}", routes={"r": route}
                )
                exports = Exports(config, pool=pool, metrics=Metrics(), topics=store)
                began = time.perf_counter()
                await exports.start()
                state = exports.get("r").queue.books
                deadline = began + 60
                while state.delivered < RECORDS and time.perf_counter() < deadline:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
                assert state.delivered >= RECORDS, exports.get("r").status()
                took = time.perf_counter() - began
                await exports.stop()
                await store.stop()
            return RECORDS / took

        return lambda: run(body())

    def plain(self, url: str) -> Callable[[], float]:
        """Records per second by the loop one writes first."""

        async def body() -> float:
            with ThreadPoolExecutor(2) as pool:
                store = self.store(pool)
                await store.start()
                groups = Groups(
                    self.directory / f"groups{self.turn}", store, pool=pool, metrics=Metrics()
                )
                await groups.start()
                topic = store.require("orders")
                began = time.perf_counter()
                offset = 0
                async with httpx.AsyncClient() as client:
                    while offset < RECORDS:
                        batch = topic.read(offset, BATCH, 1 << 20)
                        answer = await client.post(
                            url, content=b"\n".join(batch.payloads()) + b"\n"
                        )
                        answer.raise_for_status()
                        offset = batch.next_offset
                        await groups.commit("plain", "orders", offset)
                took = time.perf_counter() - began
                await groups.stop()
                await store.stop()
            return RECORDS / took

        return lambda: run(body())


class Outside:
    """A broker of its own with the records in a topic: what somebody who is not the broker can do."""

    def __init__(self, url: str) -> None:
        self.sink = url
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
        self.directory.chmod(0o755)
        self.turn = 0

    def __enter__(self) -> "Outside":
        self.broker = ServeProcess(self.directory).start()
        self.client = httpx.Client(base_url=self.broker.url, timeout=30)
        record = json.dumps({"id": 1, "pad": "x" * (RECORD - 19)})
        for _ in range(RECORDS // BATCH):
            self.client.post(
                "/topics/orders/produce", json={"payloads": [record] * BATCH}
            ).raise_for_status()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.broker.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def route(self) -> float:
        """Records per second by a route, from the request that makes it until the last one is
        delivered.
        """
        self.turn += 1
        name = f"r{self.turn}"
        route = {
            "name": name,
            "source": {"topic": "orders", "start": "earliest"},
            "destination": {"type": "http", "url": self.sink},
            "batch": {"records": BATCH, "linger": 0},
        }
        began = time.perf_counter()
        self.client.post("/api/v1/routes", json=route).raise_for_status()
        while (
            self.client.get(f"/api/v1/routes/{name}").json()["queue"]["accounting"]["delivered"]
            < RECORDS
        ):
            assert time.perf_counter() - began < 60
            time.sleep(0.005)
        took = time.perf_counter() - began
        self.client.delete(f"/api/v1/routes/{name}").raise_for_status()
        return RECORDS / took

    def plain(self) -> float:
        """Records per second by the loop one writes first, with httpx throughout."""
        self.turn += 1
        offset = 0
        began = time.perf_counter()
        while offset < RECORDS:
            answer = self.client.get(
                "/topics/orders/consume", params={"offset": offset, "max_messages": BATCH}
            ).raise_for_status()
            messages = answer.json()
            body = "".join(message["payload"] + "\n" for message in messages)
            self.client.post(self.sink, content=body).raise_for_status()
            offset = messages[-1]["offset"] + 1
            commit = f"/topics/orders/groups/plain{self.turn}/commit"
            self.client.post(commit, json={"offset": offset}).raise_for_status()
        return RECORDS / (time.perf_counter() - began)


def contests() -> Iterable[Contest]:
    yield Contest(
        "spill to disk with snappy",
        "bytes/s",
        spill,
        write_sequentially,
        "the same compressed bytes, one writer",
        at_least=0.6,
        note="ours compresses, frames and checksums; theirs only writes what was compressed before",
    )
    yield Contest(
        "spill to disk of blocks compressed before",
        "bytes/s",
        lambda: spill(compressed=True),
        write_sequentially,
        "the same compressed bytes, one writer",
        at_least=0.6,
        note="what the queue itself costs: framing, checksums, books",
    )
    yield Contest(
        "spill to disk with snappy, JSON log lines",
        "bytes/s",
        lambda: spill(log_lines),
        lambda: write_sequentially(log_lines),
        "the same compressed bytes, one writer",
        note="data that is easier to compress: fewer bytes to write for the same work",
    )
    yield Contest(
        "push with snappy, durable on both sides",
        "bytes/s",
        push_durably,
        lambda: write_sequentially(durably=True),
        "the same compressed bytes, one writer, fdatasync per push",
        at_least=0.6,
        note="how a route is run: ours also compresses, frames and checksums, four push at a time",
    )
    yield Contest(
        "spill to disk with snappy, compression counted on both sides",
        "bytes/s",
        spill,
        compress_and_write,
        "snappy and write, one writer",
        at_least=0.6,
    )
    topic = Topic()
    try:
        with sink() as url:
            yield Contest(
                "end to end over HTTP, batches of 1000 x 100 bytes",
                "records/s",
                topic.export(url),
                topic.plain(url),
                "read, httpx POST, commit, inside the broker",
                note="theirs reads the topic's files by the broker's own code and looks at no record",
            )
            with Outside(url) as outside:
                yield Contest(
                    "end to end over HTTP, batches of 1000 x 100 bytes, a broker process",
                    "records/s",
                    outside.route,
                    outside.plain,
                    "read, POST and commit with httpx",
                    at_least=5,
                )
    finally:
        topic.close()


def figures() -> Iterable[Figure]:
    rates = sorted(push_memory() for _ in range(5))
    yield Figure(
        "push to memory, 1 KB blocks", rates[2], "blocks/s", "≥ 300,000", rates[2] >= 300_000
    )
    for block in (64 << 10, 1 << 10):
        for clean, limit in ((True, 100.0), (False, 2000.0)):
            with scratch() as directory:
                fill(
                    directory, GIB + CHUNK - (CHUNK >> 3), block, clean=clean
                )  # the last chunk is almost full
                took = (
                    sorted(start_time(directory) for _ in range(3))[1]
                    if clean
                    else start_time(directory)
                )
                name = f"start with 1 GiB of {block >> 10} KiB blocks, {'clean' if clean else 'killed'}"
                yield Figure(name, took, "ms", f"< {limit:g} ms", took < limit)
                if not clean:
                    (directory / "fastqueue.meta").unlink()
                    took = start_time(directory)
                    yield Figure(f"{name}, metadata lost", took, "ms", "< 2000 ms", took < 2000)
