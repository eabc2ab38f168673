"""The scrub: what rotted on disk is found, told and refused; it goes on after a restart and beside
swaps, deletions.
"""

import asyncio
import errno
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.cli.topic import commands
from penstock.errors import Damaged
from penstock.log.aiq import checksums as check
from penstock.log.aiq.format import AiqFormat
from penstock.log.layout import BATCH_SIZE, COMPACT
from penstock.topics import scrub
from penstock.topics.store import TopicStore
from penstock.topics.topic import Topic
from tests.support.cli import CliRunner
from tests.support.faults import FaultyFs
from tests.support.served import serving
from tests.support.topics import Clock, bits, everything, running
from tests.support.wait import eventually

FIRST = "00000000000000000000"
ROOT = Path("/data")


async def fill(
    store: TopicStore, name: str = "t", segments: int = 2, batches: int = 4, size: int = 5
) -> Topic:
    """Sealed segments of 20 records in batches of 5, and an active one."""
    topic = await store.create(name)
    for _ in range(segments):
        for _ in range(batches):
            await topic.append(
                [b"record %06d " % (topic.next_offset + i) + b"x" * 20 for i in range(size)]
            )
        await topic.seal()
    await topic.append([b"active"])
    return topic


async def scrubbed(store: TopicStore) -> dict[str, Any]:
    """The report of a pass that began now."""
    before = store.scrub.status().last
    store.scrub.ask()
    await eventually(lambda: store.scrub.status().last != before)
    return msgspec.to_builtins(store.scrub.status().last)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


async def test_a_flipped_bit_is_found_told_once_and_no_longer_handed_out(tmp_path: Path) -> None:
    def check_reads(topic: Topic) -> None:
        for offset in (5, 7, 9):
            for read in (topic.read, lambda at: topic.raw(at, 1 << 20)):
                with pytest.raises(Damaged) as refused:
                    read(offset)
                assert refused.value.resume == 10
        before = topic.read(0, 1000)
        assert before.offsets.tolist() == [0, 1, 2, 3, 4]
        raw = topic.raw(0, 1 << 20)
        assert (raw.count, raw.next_offset, raw.read()) == (5, 5, before.buffer)
        assert [offset for offset, _ in everything(topic, 10)] == list(range(10, 41))

    async with running(tmp_path) as store:
        topic = await fill(store)
        sound = await scrubbed(store)
        assert (sound["segments"], sound["findings"], sound["unchecked_bytes"]) == (2, 0, 0)
        assert sound["bytes"] == sum(segment.data_size for segment in topic.segments[:-1])
        row = topic.segments[0].batch_rows(1, 2)
        flip(
            tmp_path / "t" / f"data-{FIRST}.log", int(row["end"][0]) - 1
        )  # in the payload of offset 9
        assert topic.read(9, 1).count == 1  # nobody has noticed
        assert (await scrubbed(store))["findings"] == 1
        assert (await scrubbed(store))["findings"] == 0  # known
        (place,) = topic.damage
        assert (place["outcome"], place["base"], place["lost_from"], place["lost_to"]) == (
            "lost",
            0,
            5,
            10,
        )
        assert json.loads((tmp_path / "t" / "damage.json").read_bytes()) == [place]
        check_reads(topic)
    async with running(tmp_path) as store:
        check_reads(store.require("t"))


@pytest.mark.parametrize(
    ("file", "position", "outcome"),
    [
        (f"data-{FIRST}.log", 3, "lost"),
        (f"data-{FIRST}.log", 9, "lost"),
        (f"batches-{FIRST}.crc", 2 * BATCH_SIZE + 5, "damaged"),
        (f"batches-{FIRST}.crc", 3 * BATCH_SIZE + 70, "damaged"),
        (f"index-{FIRST}.idx", 16 * 7, "damaged"),
        (f"index-{FIRST}.idx", 16 * 7 + 8, "damaged"),
    ],
)
async def test_damage_of_each_file_is_found_where_it_is(
    tmp_path: Path, file: str, position: int, outcome: str
) -> None:
    async with running(tmp_path) as store:
        topic = await fill(store)
        flip(tmp_path / "t" / file, position)
        assert (await scrubbed(store))["findings"] == 1
        (place,) = topic.damage
        assert (place["file"], place["outcome"]) == (file, outcome)
        size = (
            BATCH_SIZE
            if "batches" in file
            else 16
            if "index" in file
            else topic.segments[0].data_size
        )
        assert position - place["position"] < size * (
            2 if "index" in file else 1
        )  # a gap has two sides


async def test_a_batch_that_is_larger_than_a_step_and_foreign_records_without_checksums(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as store:
        topic = await store.create("t")
        await topic.append([b"a" * check.PART_BYTES, b"b" * check.PART_BYTES])
        await topic.append([b"small"])
        await topic.seal()
        shutil.copytree(tmp_path / "t", tmp_path / "foreign")
    for name in ("checkpoint", "incarnation", "batches.crc", f"batches-{FIRST}.crc"):
        (tmp_path / "foreign" / name).unlink()
    async with running(tmp_path) as store:
        output = await scrubbed(store)
        size = store.require("t").segments[0].data_size
        assert (output["segments"], output["bytes"], output["unchecked_bytes"]) == (
            2,
            2 * size,
            size,
        )
        assert (output["findings"], store.require("foreign").segments[0].rows) == (0, 3)
        flip(tmp_path / "t" / f"data-{FIRST}.log", check.PART_BYTES + 1000)
        flip(
            tmp_path / "foreign" / f"data-{FIRST}.log", 12 + check.PART_BYTES + 9
        )  # the length of the second record
        assert (await scrubbed(store))["findings"] == 2
        assert [place["lost_to"] for place in store.require("t").damage] == [2]
        assert store.require("foreign").damage[-1]["file"].startswith("index-")


async def test_a_sector_that_cannot_be_read_is_a_hole_and_one_that_can_the_second_time_is_not() -> (
    None
):
    fs = FaultyFs()
    async with running(ROOT, fs=fs) as store:
        topic = await fill(store, segments=1)
        assert (await scrubbed(store))["findings"] == 0
        fs.fail(2, only=["read_at"])  # the sidecar comes first, then the run of all four batches
        assert (await scrubbed(store))["findings"] == 0
        assert fs.failed == 1
        fs.fail(3, errno.EIO, only=["read_at"], forever=True)
        store.scrub.ask()
        await eventually(lambda: bool(topic.damage))
        fs.heal()
        await eventually(lambda: not store.scrub.running)
        assert {place["file"] for place in topic.damage} <= {
            f"data-{FIRST}.log",
            f"index-{FIRST}.idx",
        }


async def test_a_pass_goes_on_after_a_restart_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "START_SECONDS", 0.0)
    clock, seen, original = Clock(), [], AiqFormat.check

    # A pass never ends between these segments by itself, and its pauses are private.
    async def stuck(self: Any, *_: Any) -> None:
        if self.status().current.segments == 1:
            await asyncio.Event().wait()

    def watched(self: AiqFormat, segment: Any) -> Any:
        seen.append((segment.directory.name, segment.base))
        return original(self, segment)

    async with running(tmp_path, clock=clock) as store:
        for name in ("a", "b"):
            await fill(store, name, segments=3)
    with monkeypatch.context() as slow:
        slow.setattr(scrub.Scrub, "_pause", stuck)
        async with running(tmp_path, clock=clock, scrub_interval=60) as store:
            await eventually(lambda: getattr(store.scrub.status().current, "segments", 0) == 1)
    state = json.loads((tmp_path / ".penstock" / scrub.STATE).read_bytes())
    assert (state["topic"], state["base"], state["current"]["segments"]) == ("a", 0, 1)
    monkeypatch.setattr(AiqFormat, "check", watched)
    async with running(tmp_path, clock=clock, scrub_interval=60) as store:
        last = await eventually(lambda: store.scrub.status().last)
        assert last.segments == 6
    assert seen == [("a", 20), ("a", 40), ("b", 0), ("b", 20), ("b", 40)]


async def test_the_schedule_is_kept_and_its_file_is_only_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "START_SECONDS", 0.0)
    clock = Clock()

    async with running(tmp_path, clock=clock, scrub_interval=1000) as store:
        await fill(store)
        await eventually(lambda: store.scrub.status().last)
        assert store.scrub.status().next == clock.now + 1000
    (tmp_path / ".penstock" / scrub.STATE).write_bytes(b'{"current": 7}')
    async with running(tmp_path, clock=clock, scrub_interval=1000) as store:
        assert (await eventually(lambda: store.scrub.status().last)).segments == 2
    async with running(tmp_path, clock=clock) as store:
        status = store.scrub.status()
        assert (status.next, status.running, status.last.segments) == (None, False, 2)


async def test_it_gives_way_to_compaction_retention_and_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each happens in the middle of the check of a segment: after its first step."""
    happening: list[Any] = []
    pause = scrub.Scrub._pause  # private: nothing public happens between two steps

    async def paused(self: Any, read: int, busy: float) -> None:
        if happening:
            await happening.pop()()
        await pause(self, read, busy)

    monkeypatch.setattr(scrub.Scrub, "_pause", paused)

    async with running(tmp_path, retention_bytes=1) as store:
        kept, gone, going = [await fill(store, name, segments=3) for name in ("c", "g", "r")]
        await kept.set_policy(COMPACT)
        flip(tmp_path / "g" / f"data-{FIRST}.log", 20)

        async def swap() -> None:
            await store.compact("c", [0, 20], bits(range(0, 40, 2), 40))

        happening.append(swap)
        output = await scrubbed(store)
        assert (output["findings"], kept.damage) == (1, [])
        assert [segment.base for segment in kept.segments] == [0, 40, 60]
        assert (await scrubbed(store))["findings"] == 0  # the compacted segment is sound
        happening.append(lambda: store.delete("c"))
        assert (await scrubbed(store))["findings"] == 0
        happening.append(store.maintain)
        output = await scrubbed(store)
        assert (output["findings"], output["segments"]) == (0, 0)
        assert [len(topic.segments) for topic in (gone, going)] == [1, 1]


async def test_stopping_does_not_wait_for_a_slow_pass(tmp_path: Path) -> None:
    async with running(tmp_path, scrub_rate=1) as store:
        await fill(store)
        store.scrub.ask()
        await eventually(lambda: store.scrub.running)
        async with asyncio.timeout(30):
            await store.stop()


async def test_people_see_progress_and_findings_over_http_and_on_the_command_line(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, scrub_interval=1000) as served:
        await fill(served.topics)
        flip(tmp_path / "t" / f"data-{FIRST}.log", 20)

        async def said(*arguments: str) -> tuple[int, str]:
            run_in = asyncio.get_running_loop().run_in_executor
            done = await run_in(None, lambda: CliRunner().invoke(commands, list(arguments)))
            return done.exit_code, done.stdout

        at = ("--url", served.http.url)
        assert await said("scrub", *at) == (0, "next pass\tnow, or soon after the start\n")
        code, output = await said("scrub", "--now", "--json", *at)
        assert (code, json.loads(output)["interval"]) == (0, 1000)
        last = await eventually(lambda: served.topics.scrub.status().last)
        code, output = await said("scrub", *at)
        assert (code, "1 DAMAGED, 2 segments" in output, "next pass\t20" in output) == (
            1,
            True,
            True,
        ), output
        assert last.findings == 1
        _, output = await said("describe", "t", "--json", "--broker", served.address)
        assert json.loads(output)["damaged_places"] == 1
        assert served.metrics.values_of("penstock_topic_scrubbed_bytes_total")[()] > 0
        code, output = await said("scrub", "--url", "http://127.0.0.1:9")
        assert code == 1
