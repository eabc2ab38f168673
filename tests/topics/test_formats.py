"""Every file of ours, byte by byte. Checksums are computed by an implementation of our own."""

import struct
from pathlib import Path

from penstock.log.layout import Checkpoint, parse_sealed, sealed_name
from penstock.log.producers import Producer
from tests.support.topics import Clock, castagnoli, running

ME = bytes(range(16))


async def test_golden_bytes_of_a_topic(tmp_path: Path) -> None:
    async def body() -> str:
        async with running(tmp_path, clock=Clock(1000.0)) as store:
            topic = await store.create("t")
            await topic.append([b"one", b"three"])
            await topic.seal()
            await topic.append([b"x"], Producer(ME, 7))
            await topic.mark_archived(2)
            return topic.incarnation

    incarnation = await body()
    topic = tmp_path / "t"
    sealed = struct.pack("<QI3sQI5s", 0, 3, b"one", 1, 5, b"three")
    active = struct.pack("<QI1s", 2, 1, b"x")

    def row(*fields: int | bytes) -> bytes:
        packed = struct.pack("<QIIQQQ16sQI", *fields)
        return packed + struct.pack("<I", castagnoli(packed))

    packed = struct.pack(
        "<8s16sQQQQQQII",
        b"PENSTCK1",
        bytes.fromhex(incarnation),
        3,
        2,
        13,
        16,
        72,
        1_000_000_001,
        1,
        1,
    ) + struct.pack("<16sQIQQI", ME, 1_000_000_001, 1, 7, 2, 1)
    zeros = bytes(16)
    assert {path.name: path.read_bytes() for path in topic.iterdir()} == {
        "data-00000000000000000000.log": sealed,
        "index-00000000000000000000.idx": struct.pack("<4Q", 0, 0, 1, 15),
        "batches-00000000000000000000.crc": row(
            0, 2, 0, 0, 32, 1_000_000_000, zeros, 0, castagnoli(sealed)
        ),
        "data.log": active,
        "index.idx": struct.pack("<2Q", 2, 0),
        "batches.crc": row(2, 1, 1, 0, 13, 1_000_000_001, ME, 7, castagnoli(active)),
        "metadata.meta": struct.pack("<Q", 3),
        "checkpoint": packed + struct.pack("<I", castagnoli(packed)),
        "incarnation": b"%b %08x\n" % (incarnation.encode(), castagnoli(incarnation.encode())),
        "archived": b"2 %08x\n" % castagnoli(b"2"),
    }
    checkpoint = Checkpoint.parse((topic / "checkpoint").read_bytes())
    assert checkpoint is not None
    assert checkpoint.pack() == (topic / "checkpoint").read_bytes()


def test_names_of_sealed_files_are_told_from_all_others() -> None:
    assert parse_sealed(sealed_name("data.log", 42)) == ("data.log", 42)
    for name in (
        "data.log",
        "data-42.log",
        "data-00000000000000000042.idx",
        "index-00000000000000000042.log",
    ):
        assert parse_sealed(name) is None
