"""Many topics, long logs: opening is cheap and memory does not follow size."""

import asyncio
import time
from pathlib import Path

import numpy as np
import psutil

from penstock.io.fs import DISK
from penstock.log.aiq.format import AIQ
from penstock.log.layout import (
    CLEAN,
    HEADER_TYPE,
    INDEX_TYPE,
    STRICT,
    BatchRow,
    Checkpoint,
    pack_checked,
    pack_metadata,
)
from penstock.log.recovery import create_files
from penstock.protocol.ids import uuid7
from tests.support.form import pick
from tests.support.topics import running

RECORD = np.dtype([*HEADER_TYPE.descr, ("payload", "S8")])


def build_long_topic(directory: Path, records: int, per_segment: int) -> None:
    """What a broker leaves behind after a clean stop, without appending it record by record."""
    directory.mkdir(parents=True)
    bases = list(range(0, records, per_segment))
    for base in bases:
        count = min(per_segment, records - base)
        data, index = np.zeros(count, RECORD), np.empty(count, INDEX_TYPE)
        data["offset"] = index["offset"] = np.arange(base, base + count)
        data["length"] = 8
        index["position"] = np.arange(count) * RECORD.itemsize
        suffix = "" if base == bases[-1] else f"-{base:020d}"
        data.tofile(directory / f"data{suffix}.log")
        index.tofile(directory / f"index{suffix}.idx")
        row = BatchRow(base, count, 0, 0, data.nbytes, base + 1, bytes(16), 0, 0).pack()
        (directory / f"batches{suffix}.crc").write_bytes(row)
    incarnation = uuid7()
    (directory / "incarnation").write_bytes(pack_checked(incarnation.hex))
    (directory / "metadata.meta").write_bytes(pack_metadata(records))
    checkpoint = Checkpoint(
        incarnation.bytes, records, bases[-1], data.nbytes, index.nbytes, len(row), records, CLEAN
    )
    (directory / "checkpoint").write_bytes(checkpoint.pack())


async def test_a_long_topic_opens_within_a_second_and_reads_anywhere(tmp_path: Path) -> None:
    records = pick(short=500_000, usual=2_000_000, soak=100_000_000)
    build_long_topic(tmp_path / "t", records, records // 8)

    before = psutil.Process().memory_info().rss
    began, used = time.perf_counter(), time.process_time()
    async with running(tmp_path) as store:
        took, used = time.perf_counter() - began, time.process_time() - used
        topic = store.require("t")
        assert used < 1.0  # of a processor, which others may use too
        assert (topic.records, topic.next_offset, topic.damage) == (records, records, [])
        for offset in (0, records // 3, records - 1):
            assert topic.read(offset, 5).first_offset == offset
            assert topic.raw(offset, 1 << 20).first_offset == offset
        grown = psutil.Process().memory_info().rss - before
        assert grown < 32 << 20, f"{grown >> 20} MiB for {records} records"
        print(f"\n{records} records: opened in {took * 1000:.1f} ms, {grown >> 10} KiB more")


async def test_thousands_of_topics_open_and_take_little_memory(tmp_path: Path) -> None:
    count = pick(short=1_000, usual=2_000, soak=10_000)
    for i in range(count):
        create_files(AIQ, DISK, tmp_path / f"topic-{i:05d}", STRICT, sync=False)

    before = psutil.Process().memory_info().rss
    files = psutil.Process().num_fds()
    began = time.perf_counter()
    async with running(tmp_path, fsync="never") as store:
        took = time.perf_counter() - began
        grown = psutil.Process().memory_info().rss - before
        assert len(store.names()) == count
        assert psutil.Process().num_fds() - files < 20
        limit = store.context.open_files.limit = 50
        topics = [store.require(f"topic-{i:05d}") for i in range(0, count, 50)]
        await asyncio.gather(*(topic.append([b"x"]) for topic in topics))
        await asyncio.gather(*(topic.append([b"y"]) for topic in topics))
        assert [topic.read(0).payloads() for topic in topics] == [[b"x", b"y"]] * len(topics)
        assert psutil.Process().num_fds() - files < 3 * limit + 30, "files of idle topics stay open"
        print(f"\n{count} topics: opened in {took:.2f} s, {grown / count / 1024:.1f} KiB each")
        assert grown / count < 16 * 1024
        assert took < 30
