"""kill -9 of a process that appends to a topic itself, without a server: nothing acknowledged is
lost, no batch is there in part.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.support.form import SOAK
from tests.support.topics import FORMATS, everything, running

CHILD = """
import asyncio, sys
from pathlib import Path
from tests.support.topics import running
from penstock.log.producers import Producer

async def main(directory, policy, start, form):
    settings = {
        "fsync": policy, "segment_bytes": 20000, "fsync_interval": 0.01, "format": form
    }
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

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
"""


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("policy", ["group", "interval"])
async def test_kill_9_while_producing_loses_nothing_acknowledged(
    tmp_path: Path, policy: str, form: str
) -> None:
    random = Random(policy)
    acked: dict[int, bytes] = {}
    next_batch = 0
    for _ in range(50 if SOAK else 3):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), policy, str(next_batch), form],
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

        next_batch = await check()
    assert len(acked) > 30
