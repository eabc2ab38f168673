"""The storage of topics without any network: what appending and reading cost beside a bare Python
loop.

Theirs is the least a Python program can do: write bytes that are already laid out to a file, and
fsync every 0.1 s. Ours starts from payloads: it lays out records, index and checksums, and answers
with offsets, with as many fsyncs.
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Contest, Figure
from penstock.config.schema import TopicsSettings
from penstock.metrics import Metrics
from penstock.topics.store import TopicStore

BATCH = 1000
SIZE = 100
RECORDS = 2_000_000
INTERVAL = 0.1
IN_FLIGHT = 8
LENGTHS = np.full(BATCH, SIZE, ">u4")
PAYLOADS = memoryview(os.urandom(BATCH * SIZE))


def in_store(body: Callable[[TopicStore], Coroutine[Any, Any, float]], **settings: Any) -> float:
    directory = Path(tempfile.mkdtemp(prefix="penstock-bench-"))

    async def run() -> float:
        with ThreadPoolExecutor(2) as pool:
            store = TopicStore(directory, TopicsSettings(**settings), pool=pool, metrics=Metrics())
            await store.start()
            try:
                return await body(store)
            finally:
                await store.stop()

    try:
        return asyncio.run(run())
    finally:
        shutil.rmtree(directory)


async def append_all(store: TopicStore) -> float:
    topic = await store.create("bench")
    await topic.append([b"warm"])
    began = time.perf_counter()
    for _ in range(RECORDS // BATCH // IN_FLIGHT):
        for future in [topic.append_arrays(LENGTHS, PAYLOADS) for _ in range(IN_FLIGHT)]:
            await future
    return RECORDS / (time.perf_counter() - began)


async def append_singles(store: TopicStore) -> float:
    topic = await store.create("bench")
    payload = bytes(SIZE)
    count = 200_000
    began = time.perf_counter()
    for _ in range(count // 64):
        for future in [topic.append((payload,)) for _ in range(64)]:
            await future
    return count / (time.perf_counter() - began)


def bare_loop() -> float:
    """The same bytes from one buffer, written batch by batch and fsynced at the same rate."""
    record = bytes(12 + SIZE)
    batch = record * BATCH
    with tempfile.NamedTemporaryFile(prefix="penstock-bench-") as file:
        fd = file.fileno()
        began = synced = time.perf_counter()
        for _ in range(RECORDS // BATCH):
            os.write(fd, batch)
            now = time.perf_counter()
            if now - synced >= INTERVAL:
                os.fdatasync(fd)
                synced = now
        return RECORDS / (time.perf_counter() - began)


async def filled(store: TopicStore) -> Any:
    topic = await store.create("bench")
    for _ in range(1000):
        await topic.append_arrays(LENGTHS, PAYLOADS)
    return topic


async def read_all(store: TopicStore) -> float:
    topic = await filled(store)
    began = time.perf_counter()
    at = 0
    while at < topic.next_offset:
        at = topic.read(at, 10_000, 1 << 20).next_offset
    return float(topic.next_offset / (time.perf_counter() - began))


async def raw_all(store: TopicStore) -> float:
    topic = await filled(store)
    rates = []
    for _ in range(5):
        began = time.perf_counter()
        at, size = 0, 0
        while at < topic.next_offset:
            raw = topic.raw(at, 1 << 20)
            size += len(raw.read())
            at = raw.next_offset
        rates.append(size / (time.perf_counter() - began) / 1e9)
    return max(rates)


def contests() -> Iterable[Contest]:
    yield Contest(
        "append, batches of 1000 x 100 bytes, fsync: interval",
        "records/s",
        ours=lambda: in_store(append_all, fsync="interval", fsync_interval=INTERVAL),
        theirs=bare_loop,
        against="bare write loop, fdatasync every 0.1 s",
        at_least=0.5,
        rounds=3,
    )


def figures() -> Iterable[Figure]:
    for policy in ("group", "interval"):
        rate = in_store(append_singles, fsync=policy)
        yield Figure(f"append one by one, 64 in flight, fsync: {policy}", rate, "records/s")
    rate = in_store(append_all, fsync="group")
    yield Figure("append, batches of 1000 x 100 bytes, fsync: group", rate, "records/s")
    yield Figure("read, decoded and checked", in_store(read_all, fsync="never"), "records/s")
    rate = in_store(raw_all, fsync="never")
    yield Figure("raw log from the page cache", rate, "GB/s", target="≥ 1 GB/s", met=rate >= 1)
