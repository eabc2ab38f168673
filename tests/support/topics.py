"""A topic store in a test: real files, a pool, a clock that the test moves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config.schema import TopicsSettings
from penstock.io.fs import DISK, Fs
from penstock.metrics import Metrics
from penstock.topics.store import TopicStore
from penstock.topics.topic import Topic

FORMATS = ("aiq", "kafka")
chosen_format = "aiq"  # of the topics that tests make; the fixture `form` changes it


def log_directory(root: Path, name: str, form: str) -> Path:
    """Where a topic of this format has its files."""
    return root / name if form == "aiq" else root / ".penstock" / "logs" / name / "0"


class Clock:
    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def running(
    directory: Path, *, fs: Fs = DISK, clock: Callable[[], float] | None = None, **settings: Any
) -> AsyncIterator[TopicStore]:
    """A started store, stopped at the end."""
    settings.setdefault("free_space_reserve", 0)
    settings.setdefault("scrub_interval", 0)
    settings.setdefault("format", chosen_format)
    with ThreadPoolExecutor(2) as pool:
        given = {} if clock is None else {"clock": clock}
        store = TopicStore(
            directory, TopicsSettings(**settings), fs=fs, pool=pool, metrics=Metrics(), **given
        )
        await store.start()
        try:
            yield store
        finally:
            await store.stop()


Arrays = tuple[np.ndarray, memoryview]  # lengths of records, and their bytes


def append(
    directory: Path, name: str, batches: Iterable[Sequence[bytes] | Arrays], **settings: Any
) -> None:
    """Append batches to a topic, which is made if need be, as a broker does."""

    async def body() -> None:
        async with running(directory, **{"fsync": "never", **settings}) as store:
            topic = store.get(name) or await store.create(name)
            for batch in batches:
                if isinstance(batch, tuple):
                    await topic.append_arrays(*batch)
                else:
                    await topic.append(batch)

    asyncio.run(body())


def random_records(count: int, size: int, step: int = 100_000) -> Iterator[Arrays]:
    """Printable records of one size, in batches."""
    random = np.random.default_rng(7)
    for begin in range(0, count, step):
        records = min(step, count - begin)
        data = random.integers(32, 127, records * size, np.uint8)
        yield np.full(records, size, np.int64), memoryview(data.tobytes())


def everything(
    topic: Topic, at: int | None = None, max_records: int = 500
) -> list[tuple[int, bytes]]:
    """All visible records, read batch by batch."""
    collected: list[tuple[int, bytes]] = []
    at = topic.first_offset if at is None else at
    while at < topic.next_offset:
        batch = topic.read(at, max_records, 1 << 20)
        if not batch.count:
            break
        collected += [(offset, bytes(payload)) for offset, payload in batch]
        at = batch.next_offset
    return collected


def bits(offsets: Iterable[int], size: int, base: int = 0) -> bytes:
    """Which of `size` offsets from `base` on to keep, as compaction is told."""
    chosen = np.zeros(size, np.uint8)
    chosen[[offset - base for offset in offsets]] = 1
    return np.packbits(chosen, bitorder="little").tobytes()


def castagnoli(data: bytes, begin: int = 0) -> int:
    """CRC32C bit by bit, independent of the library that the broker uses; `begin`: of what came
    before.
    """
    crc = begin ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
