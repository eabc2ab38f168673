"""A topic that is appended to, rolled and compacted without a pause, in a process of its own: for
the kill test.

python -m tests.support.compact_process DIRECTORY ROUND

The record at offset n is `payload_of(n)`, so anyone can tell what has to be there. A line is
printed after each round of appends: how far they were answered.
"""

import asyncio
import sys
from pathlib import Path
from random import Random

from tests.support.topics import bits, everything, running


def key_of(offset: int) -> bytes:
    return b"k%d" % (offset * offset % 41)


def payload_of(offset: int) -> bytes:
    return b"%b %d" % (key_of(offset), offset)


def latest(records: list[tuple[int, bytes]]) -> dict[bytes, int]:
    """The offset of the last record of each key."""
    return {payload.split()[0]: offset for offset, payload in records}


async def work(directory: Path, seed: int) -> None:
    random = Random(seed)
    async with running(directory, fsync="group") as store:
        topic = await store.create("t")
        await topic.set_policy("compact")
        print("ready", flush=True)
        while True:
            for _ in range(3):
                await topic.append([payload_of(topic.next_offset + i) for i in range(20)])
                await topic.seal()
            print(topic.next_offset, flush=True)
            sealed = topic.segments[:-1]
            end = sealed[-1].end
            keep = latest([record for record in everything(topic) if record[0] < end]).values()
            cut = random.randint(1, len(sealed))
            for part in (sealed[:cut], sealed[cut:]):
                if part:
                    base, stop = part[0].base, part[-1].end
                    chosen = bits(
                        [offset for offset in keep if base <= offset < stop], stop - base, base
                    )
                    await store.compact("t", [segment.base for segment in part], chosen)


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), int(sys.argv[2])))
