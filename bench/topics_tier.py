"""Topics on object storage: uploads beside a plain copy, cold reads beside what the store gives.

The store is a directory, and an S3 server in a process of its own that sends files
(`bench/object_server.py`). An upload of ours computes checksums and reads everything back; a plain
copy does neither. A cold read of ours goes through the topic with an empty cache, checked block by
block; theirs is what the store gives: the objects as plain downloads, and range requests for the
same blocks, as many at a time as we read ahead.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Contest
from penstock.config.schema import LocalRetention, TopicsSettings
from penstock.log.tier.cache import MAX_BLOCKS_AHEAD
from penstock.log.tier.manifest import BLOCK_BYTES
from penstock.metrics import Metrics
from penstock.object_store import ObjectStore
from penstock.topics.store import TopicStore
from penstock.topics.topic import Topic

BATCH, SIZE = 1000, 1000
BATCHES = 128  # 128 MB
SEGMENT_BYTES = 32 << 20
READ_BYTES = 1 << 20
LENGTHS = np.full(BATCH, SIZE, ">u4")
PAYLOADS = memoryview(os.urandom(BATCH * SIZE))
MB = 1e6


@contextmanager
def s3_server(directory: Path) -> Iterator[str]:
    """An S3 server with a bucket; its address is put into the environment."""
    words = [sys.executable, "-m", "bench.object_server", str(directory / "objects")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            os.environ |= {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.stdout.readline().strip()}",
                "AWS_ACCESS_KEY_ID": "bench",
                "AWS_SECRET_ACCESS_KEY": "bench",
                "AWS_REGION": "us-east-1",
            }
            yield "s3://bench/tier"
        finally:
            server.kill()


async def _with_store(
    directory: Path, address: str, body: Callable[[TopicStore], Any], *, keep: bool = False
) -> Any:
    """`keep`: nothing leaves the local disk."""
    settings = TopicsSettings(
        tier=address,
        tier_delay=0.0,
        segment_bytes=SEGMENT_BYTES,
        fsync="never",
        local_retention=LocalRetention(bytes=0 if keep else 1),
        scrub_interval=0,
    )
    with ThreadPoolExecutor(2) as pool:
        store = TopicStore(directory, settings, pool=pool, metrics=Metrics())
        await store.start()
        try:
            return await body(store)
        finally:
            if store.tier is not None:
                store.tier.close()
            await store.stop()


async def _filled(store: TopicStore) -> Topic:
    await store.create("bench")
    topic = store.local("bench")
    for _ in range(BATCHES):
        await topic.append_arrays(LENGTHS, PAYLOADS)
    await topic.seal()
    return topic


class Rounds:
    """Each round works on a fresh directory and a fresh prefix."""

    def __init__(self, directory: Path, address: str) -> None:
        self._directory = directory
        self._address = address
        self._number = 0

    def _fresh(self) -> tuple[Path, str]:
        self._number += 1
        return self._directory / str(self._number), f"{self._address}/{self._number}"

    def upload(self) -> float:
        data, address = self._fresh()

        async def body(store: TopicStore) -> float:
            topic = await _filled(store)
            size = topic.local_bytes
            began = time.perf_counter()
            assert store.tier is not None
            assert await store.tier.synchronize(), store.tier.problem
            return size / (time.perf_counter() - began) / MB

        try:
            return float(asyncio.run(_with_store(data, address, body, keep=True)))
        finally:
            shutil.rmtree(data, ignore_errors=True)

    def plain_copy(self) -> float:
        """The same files, to a directory with fsync, or as plain uploads."""
        data, address = self._fresh()

        async def body(store: TopicStore) -> Path:
            return (await _filled(store)).directory

        topic: Path = asyncio.run(_with_store(data, f"{address}-unused", body))
        files = sorted(topic.glob("*-*.*"))
        size = sum(file.stat().st_size for file in files)
        target = ObjectStore(address)
        began = time.perf_counter()
        for file in files:
            if target.directory is not None:
                copy = target.directory / file.name
                shutil.copyfile(file, copy)
                with copy.open("rb") as written:
                    os.fsync(written.fileno())
            else:
                target.write(file.name, [file.read_bytes()])
        taken = time.perf_counter() - began
        shutil.rmtree(data, ignore_errors=True)
        return size / taken / MB


class ColdReads:
    """One tier for all rounds; the cache is empty in each."""

    def __init__(self, directory: Path, address: str) -> None:
        self._data = directory / "cold"
        self._address = f"{address}/cold"

        async def body(store: TopicStore) -> None:
            await _filled(store)
            assert store.tier is not None
            assert await store.tier.synchronize(), store.tier.problem

        asyncio.run(_with_store(self._data, self._address, body))

    def through(self) -> float:
        async def body(store: TopicStore) -> float:
            topic = store.local("bench")
            began = time.perf_counter()
            at = size = 0
            while at < topic.next_offset:
                raw = await topic.read_through(lambda at=at: _raw(topic, at))  # type: ignore[misc]
                size += len(raw[0])
                at = raw[1]
            return size / (time.perf_counter() - began) / MB

        return float(asyncio.run(_with_store(self._data, self._address, body)))

    def downloads(self) -> float:
        """What the store gives in one plain download after the other."""
        store = ObjectStore(self._address)
        names = sorted(name for name in store.names() if name.endswith(".log"))
        began = time.perf_counter()
        size = sum(len(part) for name in names for part in store.read(name))
        return size / (time.perf_counter() - began) / MB

    def ranges(self) -> float:
        """What the store gives: the same blocks, as many at a time as we read ahead."""
        store = ObjectStore(self._address)
        blocks = [
            (item.name, start, min(BLOCK_BYTES, item.size - start))
            for item in store.list()
            if item.name.endswith(".log")
            for start in range(0, item.size, BLOCK_BYTES)
        ]
        began = time.perf_counter()
        with ThreadPoolExecutor(MAX_BLOCKS_AHEAD) as pool:
            size = sum(len(data) for data in pool.map(lambda one: store.read_range(*one), blocks))
        return size / (time.perf_counter() - began) / MB


def _raw(topic: Topic, at: int) -> tuple[bytes, int]:
    raw = topic.raw(at, READ_BYTES)
    return raw.read(), raw.next_offset


def contests() -> Iterable[Contest]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        directory = Path(name)
        with s3_server(directory) as bucket:
            for kind, address in (("a directory", f"file://{name}/store"), ("S3", bucket)):
                rounds = Rounds(directory, address)
                yield Contest(
                    f"tier: upload of segments to {kind}",
                    "MB/s",
                    ours=rounds.upload,
                    theirs=rounds.plain_copy,
                    against="plain copy, not read back",
                    at_least=0.5,
                    rounds=3,
                    note="ours is checked: every block is read back and compared",
                )
            reads = ColdReads(directory, bucket)
            for against, theirs in (
                ("plain downloads of the objects", reads.downloads),
                ("range requests, 8 at a time", reads.ranges),
            ):
                yield Contest(
                    "tier: cold read in order from S3",
                    "MB/s",
                    ours=reads.through,
                    theirs=theirs,
                    against=against,
                    at_least=0.5,
                    rounds=3,
                )
