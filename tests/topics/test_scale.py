"""Many topics, long logs: opening is cheap and memory does not follow size. Real files, real
processes, real kills.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import psutil
import pytest

from penstock.log.fs import DISK
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
from tests.support.form import SOAK
from tests.support.topics import everything, run, running

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


def test_a_long_topic_opens_within_a_second_and_reads_anywhere(tmp_path: Path) -> None:
    records = 100_000_000 if SOAK else 2_000_000
    build_long_topic(tmp_path / "t", records, records // 8)

    async def body() -> None:
        before = psutil.Process().memory_info().rss
        began = time.perf_counter()
        async with running(tmp_path) as store:
            took = time.perf_counter() - began
            topic = store.require("t")
            assert took < 1.0
            assert (topic.records, topic.next_offset, topic.damage) == (records, records, [])
            for offset in (0, records // 3, records - 1):
                assert topic.read(offset, 5).first_offset == offset
                assert topic.raw(offset, 1 << 20).first_offset == offset
            grown = psutil.Process().memory_info().rss - before
            assert grown < 32 << 20, f"{grown >> 20} MiB for {records} records"
            print(f"\n{records} records: opened in {took * 1000:.1f} ms, {grown >> 10} KiB more")

    run(body())


def test_thousands_of_topics_open_and_take_little_memory(tmp_path: Path) -> None:
    count = 10_000 if SOAK else 2_000
    for i in range(count):
        create_files(DISK, tmp_path / f"topic-{i:05d}", STRICT, sync=False)

    async def body() -> None:
        before = psutil.Process().memory_info().rss
        files = psutil.Process().num_fds()
        began = time.perf_counter()
        async with running(tmp_path, fsync="never") as store:
            took = time.perf_counter() - began
            grown = psutil.Process().memory_info().rss - before
            assert len(store.names()) == count
            assert psutil.Process().num_fds() - files < 20
            limit = store._context.open_files.limit = 50
            topics = [store.require(f"topic-{i:05d}") for i in range(0, count, 50)]
            await asyncio.gather(*(topic.append([b"x"]) for topic in topics))
            await asyncio.gather(*(topic.append([b"y"]) for topic in topics))
            assert [topic.read(0).payloads() for topic in topics] == [[b"x", b"y"]] * len(topics)
            assert psutil.Process().num_fds() - files < 3 * limit + 30, (
                "files of idle topics stay open"
            )
            print(f"\n{count} topics: opened in {took:.2f} s, {grown / count / 1024:.1f} KiB each")
            assert grown / count < 16 * 1024
            assert took < 30
            for topic in (
                store
            ):  # stopping 10,000 topics that were never written to is not what is measured here
                topic._segments._state = CLEAN

    run(body())


CHILD = """
import asyncio, sys
from pathlib import Path
from tests.support.topics import running
from penstock.log.producers import Producer

async def main(directory, policy, start):
    settings = {"fsync": policy, "segment_bytes": 20000, "fsync_interval": 0.01}
    async with running(Path(directory), **settings) as store:
        topic = await store.create("t")
        i = start
        pending = []
        while True:
            payloads = [b"%d/%d" % (i, j) for j in range(i % 7 + 1)]
            pending.append((i, topic.append(payloads, Producer(b"p" * 16, i))))
            i += 1
            if len(pending) == 8:
                for number, future in pending:
                    appended = await future
                    sys.stdout.write(f"{number} {appended.first_offset} {appended.count}\\n")
                sys.stdout.flush()
                pending = []

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


@pytest.mark.parametrize("policy", ["group", "interval"])
def test_kill_9_while_producing_loses_nothing_acknowledged(tmp_path: Path, policy: str) -> None:
    random = Random(policy)
    acked: dict[int, bytes] = {}
    next_batch = 0
    for _ in range(50 if SOAK else 3):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), policy, str(next_batch)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        lines = []
        for _ in range(random.randint(1, 120)):
            line = child.stdout.readline()
            assert line, "the producer ended by itself"
            lines.append(line)
        os.kill(child.pid, signal.SIGKILL)
        lines += child.stdout.read().splitlines(keepends=True)
        child.wait()
        for line in lines:
            if line.endswith("\n"):
                number, first, count = (int(part) for part in line.split())
                for j in range(count):
                    assert first + j not in acked, "an offset was given out twice"
                    acked[first + j] = b"%d/%d" % (number, j)

        async def check() -> int:
            async with running(tmp_path) as store:
                result = everything(store.require("t"))
                assert [offset for offset, _ in result] == list(range(len(result)))
                payloads = dict(result)
                assert all(payloads.get(offset) == payload for offset, payload in acked.items())
                numbers = [int(payload.split(b"/")[0]) for _, payload in result]
                assert numbers == sorted(numbers)
                assert len(set(payloads.values())) == len(result), "a record is there twice"
                assert store.require("t").damage == []
                last = numbers[-1]
                assert numbers.count(last) == last % 7 + 1, "part of a batch is there"
                return last + 1

        next_batch = run(check())
    assert len(acked) > 30
