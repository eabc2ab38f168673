"""A data directory of the original server opens here, and ours looks like one of its."""

import base64
import json
import shutil
import struct
from pathlib import Path

import pytest

from tests.support.topics import everything, running

ORIGINAL = Path(__file__).parent / "fixtures" / "original"
EXPECTED = json.loads((ORIGINAL / "expected.json").read_text())["topics"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ORIGINAL / "data", tmp_path / "data"))


async def test_every_record_of_the_original_server_is_served(data: Path) -> None:
    async with running(data) as store:
        assert store.names() == sorted(EXPECTED)
        for name, payloads in EXPECTED.items():
            topic = store.require(name)
            wanted = [
                (offset, base64.b64decode(payload)) for offset, payload in enumerate(payloads)
            ]
            assert everything(topic) == wanted
            assert topic.next_offset == len(payloads)
            assert topic.damage == []


async def test_opening_does_not_touch_the_original_files(data: Path) -> None:
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}

    async with running(data):
        pass
    assert {path: path.read_bytes() for path in before} == before


async def test_what_we_append_is_what_the_original_would_have_written(data: Path) -> None:
    async with running(data) as store:
        topic = await store.create("ours")
        await topic.append([b"one", b"", b"three"])
        await store.require("orders").append([b"twenty-six"])
    ours = data / "ours"
    records = [b"one", b"", b"three"]
    log = b"".join(struct.pack("<QI", i, len(p)) + p for i, p in enumerate(records))
    assert (ours / "data.log").read_bytes() == log
    assert (ours / "index.idx").read_bytes() == struct.pack("<6Q", 0, 0, 1, 15, 2, 27)
    assert (ours / "metadata.meta").read_bytes() == struct.pack("<Q", 3)
    original = (ORIGINAL / "data" / "orders" / "data.log").read_bytes()
    assert (data / "orders" / "data.log").read_bytes() == original + struct.pack(
        "<QI", 25, 10
    ) + b"twenty-six"
    assert (data / "orders" / "metadata.meta").read_bytes() == struct.pack("<Q", 26)
