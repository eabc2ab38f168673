"""Compaction: sealed segments become one with fewer records; readers, writers and crashes never see
a mixture.
"""

import asyncio
import errno
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import (
    Conflict,
    Damaged,
    InvalidRequest,
    PenstockError,
    StorageFailed,
    StorageFull,
    Unavailable,
)
from penstock.log import topic_files
from penstock.log.layout import DATA, parse_sealed, sealed_name
from penstock.log.producers import Producer
from penstock.log.topic_files import OpenSegment, TopicFiles
from penstock.log.verify import verify
from penstock.pipeline.options import TopicSourceOptions
from penstock.pipeline.sources.topic_catalog import Topics as TopicSource
from penstock.protocol.record_batch import Batch
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore
from penstock.topics.topic import Topic
from penstock.wire.feed import FeedChunk, Feeds
from tests.support.compact_process import key_of, latest, payload_of
from tests.support.faults import CHANGES, HOWS, FaultyFs, How
from tests.support.form import SOAK, pick
from tests.support.served import serving
from tests.support.topics import Clock, bits, castagnoli, everything, running
from tests.support.wait import eventually

ROOT = Path("/data")
ME = b"producer-of-test"


async def filled(
    store: TopicStore, segments: Sequence[Sequence[bytes]], *, active: Sequence[bytes] = ()
) -> Topic:
    """A topic with these sealed segments, its policy `compact`."""
    topic = await store.create("t")
    await topic.set_policy("compact")
    for payloads in segments:
        await topic.append(list(payloads))
        await topic.seal()
    if active:
        await topic.append(list(active))
    return topic


async def keep_only(store: TopicStore, offsets: Sequence[int], bases: Sequence[int]) -> Any:
    topic = store.require("t")
    end = next(segment.end for segment in topic.segments if segment.base == bases[-1])
    chosen = [offset for offset in offsets if bases[0] <= offset < end]
    return await store.compact("t", bases, bits(chosen, end - bases[0], bases[0]))


Step = st.one_of(
    st.lists(
        st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=12
    ),  # append: key, is a tombstone
    st.just("roll"),
    st.integers(0, 1000),  # compact, cut somewhere
    st.just("reopen"),
)


@given(st.lists(Step, min_size=3, max_size=25))
@example([[(0, False)], "roll", [(0, False), (0, False)], "roll", [(0, False)], 1])
@settings(max_examples=pick(short=15, usual=40, soak=400), deadline=None)
async def test_whatever_is_compacted_the_latest_of_each_key_and_the_order_stay(
    steps: list[Any],
) -> None:
    """Against a dict: offset -> (payload, time), with superseded records and old tombstones taken
    out by hand.
    """

    async def compacted(
        store: TopicStore, topic: Topic, model: dict[int, tuple[bytes, int]], cut: int
    ) -> None:
        sealed = topic.segments[:-1]
        if not sealed:
            return
        end = sealed[-1].end
        last = {
            payload.split()[0]: offset
            for offset, (payload, _) in sorted(model.items())
            if offset < end
        }
        keep = {offset for offset in last.values() if model[offset][0].split()[1:]}
        first = cut % len(sealed)
        for part in (sealed[:first], sealed[first:]):
            if not part:
                continue
            base, stop = part[0].base, part[-1].end
            await keep_only(store, sorted(keep), [segment.base for segment in part])
            inside = [offset for offset in model if base <= offset < stop]
            stay = {offset for offset in inside if offset in keep}
            if part[-1] is sealed[-1] or not stay:
                stay.add(
                    max(inside)
                )  # the newest sealed record, or the last of what would be nothing
            for offset in inside:
                if offset not in stay:
                    del model[offset]

    fs, clock = FaultyFs(), Clock(1000.0)
    model: dict[int, tuple[bytes, int]] = {}
    made = 0
    left = list(steps)
    while left:
        async with running(ROOT, fs=fs, clock=clock) as store:
            topic = await filled(store, [])
            while left:
                step = left.pop(0)
                if step == "reopen":
                    break
                if step == "roll":
                    await topic.seal()
                elif isinstance(step, int):
                    await compacted(store, topic, model, step)
                else:
                    clock.now += 1
                    payloads = [
                        b"%d %s" % (key, b"" if gone else b"%d" % (made + i))
                        for i, (key, gone) in enumerate(step)
                    ]
                    made += len(step)
                    appended = await topic.append(payloads)
                    for i, payload in enumerate(payloads):
                        model[appended.first_offset + i] = (payload, topic.segments[-1].newest)
            records = everything(topic, max_records=3)
            assert records == [(offset, payload) for offset, (payload, _) in sorted(model.items())]
            offsets = np.array([offset for offset, _ in records], np.int64)
            assert topic.timestamps(offsets).tolist() == [
                model[int(offset)][1] for offset in offsets
            ]
            assert topic.records == len(model)
            for at in range(topic.next_offset):
                assert topic.records_from(at) == sum(offset >= at for offset in model)
                raw = topic.raw(at, 1 << 20)
                assert raw.first_offset == min(
                    (offset for offset in model if offset >= at), default=topic.next_offset
                )
            assert topic.damage == []
        assert verify(ROOT / "t", fs=fs).findings == []


def check_records(offsets: list[int], payloads: list[bytes], times: list[int]) -> None:
    assert payloads == [payload_of(offset) for offset in offsets]
    assert offsets == sorted(set(offsets))
    assert times == [1_000_000 + offset // 10 for offset in offsets], "a time is not its record's"


class CompactedUnderLoad:
    """A topic that is written and compacted while it is read in every way."""

    def __init__(self, store: TopicStore, topic: Topic, clock: Clock) -> None:
        self._store = store
        self._topic = topic
        self._clock = clock
        self.stop = threading.Event()
        self.errors: list[Exception] = []
        self.rounds = {"files": 0, "read": 0, "raw": 0}  # how often each reader read everything

    def read_files(self) -> None:
        files = TopicFiles(self._topic.directory)
        try:
            while not self.stop.is_set():
                first, end = files.bounds()
                assert first == 0
                for piece in files.read(first, end):
                    places = piece.starts.tolist()
                    payloads = [bytes(piece.raw[a + 12 : b]) for a, b in pairwise(places)]
                    times = (piece.times // 1_000_000).tolist()
                    check_records(piece.offsets.tolist(), payloads, times)
                self.rounds["files"] += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, the test fails with it
            self.errors.append(error)

    async def write(self) -> None:
        topic = self._topic
        while not self.stop.is_set():
            self._clock.now = 1_000_000.0 + topic.next_offset // 10
            first = topic.next_offset
            await topic.append([payload_of(first + i) for i in range(10)])
            if first % 40 == 30:
                await topic.seal()
            await eventually(lambda: len(topic.segments) < 30 or self.stop.is_set(), 60)
            await asyncio.sleep(0)

    async def read(self, way: str) -> None:
        read = self._read_batch if way == "read" else self._read_raw
        while not self.stop.is_set():
            at, end = 0, self._topic.next_offset
            while at < end:
                following = await read(at)
                assert following > at
                at = following
                await asyncio.sleep(0)
            self.rounds[way] += 1
            await asyncio.sleep(0)

    async def _read_batch(self, at: int) -> int:
        batch = self._topic.read(at, 17)
        times = self._topic.timestamps(batch.offsets) // 1_000_000
        check_records(batch.offsets.tolist(), batch.payloads(), times.tolist())
        return batch.next_offset

    async def _read_raw(self, at: int) -> int:
        raw = self._topic.raw(at, 400)
        times = self._topic.timestamps(raw.offsets) // 1_000_000
        await asyncio.sleep(0)  # a transfer takes its time
        fetched = Batch("t", raw.first_offset, raw.read())
        check_records(fetched.offsets().tolist(), fetched.payloads(), times.tolist())
        return raw.next_offset

    async def compact(self) -> None:
        for swaps in count():
            if (swaps >= (200 if SOAK else 10) and min(self.rounds.values()) > 5) or self.errors:
                self.stop.set()
                return
            await eventually(lambda: len(self._topic.segments) > 3, 50)
            sealed = self._topic.segments[:-1]
            old = [record for record in everything(self._topic) if record[0] < sealed[-1].end]
            keep = sorted(latest(old).values())
            await keep_only(self._store, keep, [segment.base for segment in sealed])


async def test_readers_and_writers_go_on_while_segments_are_swapped(tmp_path: Path) -> None:
    """Every way to read, all at once, over and over: what is read is right, in order, and misses
    nothing kept.
    """
    clock = Clock(1_000_000.0)
    async with running(tmp_path, clock=clock, fsync="never") as store:
        topic = await filled(store, [])
        load = CompactedUnderLoad(store, topic, clock)
        reading = asyncio.create_task(asyncio.to_thread(load.read_files))
        try:
            async with asyncio.timeout(60):
                await asyncio.gather(
                    load.write(), load.read("read"), load.read("raw"), load.compact()
                )
        finally:
            load.stop.set()
            await reading
        assert load.errors == []
        assert topic.damage == []
    assert verify(tmp_path / "t").findings == []


OLD, NEW = list(range(18)), [1, 6, *range(12, 18)]


def offsets_of(topic: Topic) -> list[int]:
    return [offset for offset, _ in everything(topic)]


async def swap_with_a_fault(
    store: TopicStore, fs: FaultyFs, n: int, code: int, *, forever: bool
) -> bool:
    """Swap while the n-th change of the disk fails; whether it was done."""
    topic = await filled(store, [[b"x"] * 4] * 4, active=[b"y"])
    await topic.append([b"z"], Producer(ME, 7))
    fs.fail(n, code, forever=forever, only=CHANGES)
    try:
        await keep_only(store, [1, 6], [0, 4, 8])
    except (StorageFailed, StorageFull):
        return False
    return True


@pytest.mark.parametrize("how", HOWS)
async def test_a_crash_at_any_call_of_a_swap_leaves_the_old_or_the_new_segments(how: How) -> None:
    outcomes = set()
    for n in count(1, pick(short=4, usual=1, soak=1)):
        fs = FaultyFs()
        async with running(ROOT, fs=fs) as store:
            done = await swap_with_a_fault(store, fs, n, errno.EIO, forever=True)
            after = fs.crash(Random(n), how)  # "keep" is also what a killed process leaves
            over = fs.failed == 0
            fs.heal()
            assert offsets_of(store.require("t")) == (NEW if done else OLD), n
        found_sealed = [
            finding for finding in verify(ROOT / "t", fs=after).findings if "-" in finding.file
        ]
        assert found_sealed == [], n  # sealed segments are looked at as they will be opened
        async with running(ROOT, fs=after) as store:
            topic = store.require("t")
            result = offsets_of(topic)
            assert result == NEW if done else result in (OLD, NEW), (n, result)
            assert (topic.first_offset, topic.next_offset, topic.damage, topic.policy) == (
                0,
                18,
                [],
                "compact",
            )
            assert (await topic.append([b"?"], Producer(ME, 7))).duplicate
            assert not [path for path in after.files if "swap" in path.name]
            outcomes.add(len(result))
        assert verify(ROOT / "t", fs=after).findings == []
        if over:
            break
    assert n > 20
    assert outcomes == {len(OLD), len(NEW)}


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
async def test_one_failing_call_of_a_swap_is_survived_without_a_restart(code: int) -> None:
    for n in count(1, pick(short=4, usual=1, soak=1)):
        fs = FaultyFs()
        async with running(ROOT, fs=fs) as store:
            done = await swap_with_a_fault(store, fs, n, code, forever=False)
            over = fs.failed == 0
            fs.heal()
            topic = store.require("t")
            assert offsets_of(topic) == (NEW if done else OLD), n
            assert (await topic.append([b"more"])).first_offset == 18
            await keep_only(
                store, [1], [segment.base for segment in topic.segments if segment.base < 12]
            )
            assert topic.unfinished_swap is None
            assert offsets_of(topic) == [1, *range(12, 19)]
        async with running(ROOT, fs=fs.crash(Random(n), "drop")) as store:
            assert offsets_of(store.require("t")) == [1, *range(12, 19)]
        if over:
            break
    assert n > 20


async def test_a_disk_without_room_for_the_copy_refuses_and_leaves_nothing_behind() -> None:
    fs = FaultyFs()
    async with running(ROOT, fs=fs, free_space_reserve=1000) as store:
        topic = await filled(store, [[b"x" * 100] * 4] * 2)
        fs.free = 1100
        with pytest.raises(StorageFull, match="no room"):
            await keep_only(store, [1, 6], [0, 4])
        assert len(everything(topic)) == 8
        assert not [path for path in fs.files if "swap" in path.name]
        fs.free = 1 << 30
        assert (await keep_only(store, [1, 7], [0, 4])).records == 2


async def test_the_policy_and_the_marker_of_a_swap_are_text_with_a_checksum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fs = FaultyFs()
    async with running(ROOT, fs=fs) as store:
        await filled(store, [[b"x"] * 4] * 3)
        assert bytes(fs.files[ROOT / "t" / "policy"].data) == b"compact %08x\n" % castagnoli(
            b"compact"
        )
        fs.fail(
            1, errno.EIO, forever=True, only={"rename"}
        )  # the swap counts, its files cannot get their names
        await keep_only(store, [1, 6], [0, 4])
        marker = b"0,4 %08x\n" % castagnoli(b"0,4")
        assert bytes(fs.files[ROOT / "t" / f"swap-{0:020d}"].data) == marker
        assert offsets_of(store.require("t")) == [1, 6, 8, 9, 10, 11]
        fs.heal()
        await store.maintain()  # whoever looks after the segments next ends it
        assert not [path for path in fs.files if "swap" in path.name]
    fs.files[ROOT / "t" / "policy"].data[:] = b"rotten\n"
    async with running(ROOT, fs=fs, retention_age=1.0) as store:
        assert store.require("t").policy == "compact"  # the one that deletes nothing by itself


async def test_what_may_not_be_compacted_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        topic = await store.create("t")
        for i in range(3):
            await topic.append([b"%d" % i] * 10)
            await topic.seal()
        with pytest.raises(Conflict, match="policy of topic 't' is 'delete'"):
            await keep_only(store, [], [0])
        with pytest.raises(InvalidRequest, match="'delete' or 'compact'"):
            await topic.set_policy("shrink")
        await topic.set_policy("compact")
        for bases in ([30], [0, 20], [5], [20, 30], []):
            with pytest.raises(Conflict, match="not neighbouring"):
                await store.compact("t", bases, bytes(100))
        with pytest.raises(InvalidRequest, match="8 bits are too few for 10"):
            await store.compact("t", [0], bytes(1))
        with pytest.raises(Conflict, match="is incarnation"):
            await store.compact("t", [0], bytes(2), "0" * 32)
        await topic.mark_archived(15)
        with pytest.raises(Conflict, match="archived up to offset 15, not up to 20"):
            await keep_only(store, [0], [0, 10])
        assert (await keep_only(store, [3], [0])).records == 1
        assert topic.policy == "compact"
        await store.delete("t")
        with pytest.raises(PenstockError):
            await store.compact("t", [0], bytes(2))


async def test_damage_is_refused_and_never_gets_a_new_checksum(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        topic = await filled(store, [[b"a" * 50] * 4, [b"b" * 50] * 4])
        path = tmp_path / "t" / sealed_name(DATA, 4)
        data = bytearray(path.read_bytes())
        data[100] ^= 1  # inside a payload: only the checksum tells
        path.write_bytes(data)
        with pytest.raises(
            Damaged, match=r"data-0{19}4\.log: bytes 0 to 248 do not match their checksum"
        ):
            await keep_only(store, [0, 7], [0, 4])
        assert [path.name for path in (tmp_path / "t").iterdir() if "swap" in path.name] == []
        topic.damage.append({"what": "offsets 2 to 3 are lost", "lost_from": 2, "lost_to": 4})
        with pytest.raises(Damaged, match="damaged segments are not compacted"):
            await keep_only(store, [0], [0])


async def test_a_topic_that_is_compacted_keeps_what_retention_would_delete(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, clock=clock, retention_age=60.0, retention_bytes=10) as store:
        topic = await filled(store, [[b"x"] * 4] * 3)
        clock.now += 1000
        await store.maintain()
        assert topic.first_offset == 0
        await topic.set_policy("delete")
        await store.maintain()
        assert topic.first_offset == 12
    async with running(tmp_path) as store:
        assert store.require("t").policy == "delete"


async def test_a_swap_gives_up_when_the_broker_stops_and_leaves_the_old_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fs = FaultyFs()
    async with running(ROOT, fs=fs) as store:
        topic = await filled(store, [[b"x"] * 4] * 3)
        started = asyncio.Event()
        loop = asyncio.get_running_loop()
        real, go = fs.free_bytes, threading.Event()

        def slow(path: Path) -> int:
            loop.call_soon_threadsafe(started.set)
            assert go.wait(20)
            return real(path)

        monkeypatch.setattr(fs, "free_bytes", slow)
        swap = asyncio.ensure_future(keep_only(store, [0, 5, 11], [0, 4, 8]))
        await started.wait()
        stopping = asyncio.ensure_future(topic.stop())
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(Unavailable, match="is stopping"):
            await swap
        await stopping
    async with running(ROOT, fs=fs) as store:
        assert len(everything(store.require("t"))) == 12


async def test_groups_feeds_and_consumers_cope_with_gaps(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        store: TopicStore = served.topics
        topic = await filled(
            store, [[b"%d" % (10 * s + i) for i in range(10)] for s in range(3)], active=[b"30"]
        )
        groups: Groups = served.groups
        await groups.commit("g", "t", 5)
        await keep_only(store, [2, 15, 29], [0, 10, 20])
        assert groups.lag("g", "t") == 3  # 15, 29, 30: records, not offsets
        leases = []
        while (lease := groups.lease("g", "t", "me", 5)) is not None:
            leases.append((lease.start, lease.end))
            await groups.complete(lease.lease_id)
        assert leases[0] == (5, 10)
        assert groups.committed("g", "t") == 31

        collected: list[int] = []

        class Subscriber:
            def deliver(self, chunk: FeedChunk) -> bool:
                collected.extend(int(at) for at in re.findall(rb"^id: (\d+)$", chunk.sse, re.M))
                return True

            def ended(self) -> None:
                pass

        Feeds().subscribe(topic, Subscriber(), 3)
        await eventually(lambda: collected == [15, 29, 30])

        from penstock.client import Client

        async with Client(topics=served.address) as client:
            info = await client.topic("t").info()
            assert (info.first_offset, info.next_offset, info.records, info.policy) == (
                0,
                31,
                4,
                "compact",
            )
            read = [
                record.offset async for record in client.topic("t").reader(start=0, follow=False)
            ]
            assert read == [2, 15, 29, 30]
            leased = [
                record.offset
                async for record in client.topic("t").reader(group="h", max_records=4, follow=False)
            ]
            assert leased == [2, 15, 29, 30]

        def ranges() -> list[list[int]]:
            """As tasks of a Spark batch read: most of them find nothing."""
            source = TopicSource(TopicSourceOptions(broker=served.address, topics=["t"]))
            cuts = [(start, min(start + 4, 31)) for start in range(0, 31, 4)]
            pieces = [list(source.read("t", topic.incarnation, *cut)) for cut in cuts]
            source.close()
            assert all(len(piece.offsets) for collected in pieces for piece in collected)
            return [[int(o) for piece in collected for o in piece.offsets] for collected in pieces]

        assert await asyncio.to_thread(ranges) == [[2], [], [], [15], [], [], [], [29, 30]]


async def test_files_are_not_read_in_the_middle_of_a_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as store:
        await filled(store, [[b"%d" % i] for i in range(3)], active=[b"3"])
        await keep_only(store, [1, 2], [0, 1, 2])
    files = TopicFiles(tmp_path / "t")
    assert files.bounds() == (0, 4)  # although its first record is gone
    marker = tmp_path / "t" / f"swap-{0:020d}"
    marker.write_text("0 f4dd1ee8\n")
    monkeypatch.setattr(topic_files, "SWAP_SECONDS", 0.02)
    with pytest.raises(Unavailable, match="an unfinished swap of segments"):
        list(files.read(0, 4))
    monkeypatch.setattr(topic_files, "SWAP_SECONDS", 20.0)
    timer = threading.Timer(0.05, marker.unlink)
    timer.start()
    assert [int(offset) for piece in files.read(0, 4) for offset in piece.offsets] == [1, 2, 3]
    timer.join()


@pytest.mark.parametrize("question", ["bounds", "read", "offset_at"])
async def test_files_that_are_rolled_between_listing_and_opening_are_listed_again(
    tmp_path: Path, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what was active is taken for gone: a reader beside the broker would report a loss."""

    clock = Clock(1_000.0)
    async with running(tmp_path, clock=clock, fsync="never") as store:
        topic = await store.create("t")
        await topic.append([b"0", b"1"])
        files = TopicFiles(topic.directory)
        loop, open_segment, rolls = asyncio.get_running_loop(), topic_files.OpenSegment, [1]

        async def roll() -> None:
            await topic.seal()
            clock.now = 2_000.0
            await topic.append([b"2"])

        def opening(directory: Path, base: int | None) -> OpenSegment:
            if rolls:
                rolls.pop()
                asyncio.run_coroutine_threadsafe(roll(), loop).result(60)
            return open_segment(directory, base)

        def ask() -> Any:
            if question == "read":
                return [int(at) for piece in files.read(0, 2) for at in piece.offsets]
            return files.bounds() if question == "bounds" else files.offset_at(0)

        monkeypatch.setattr(topic_files, "OpenSegment", opening)
        expected = {"bounds": (0, 3), "read": [0, 1], "offset_at": 0}
        assert await asyncio.to_thread(ask) == expected[question]


@pytest.mark.chaos
async def test_a_broker_killed_while_it_compacts_has_every_latest_record(tmp_path: Path) -> None:
    unfinished = 0
    for kill in range(25 if SOAK else 3):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.compact_process", str(tmp_path), str(kill)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        answered = [int(process.stdout.readline()) for _ in range(2)]
        # The moment of death is the point: nothing is waited for.
        await asyncio.sleep(Random(kill).random() * 0.05)
        process.send_signal(signal.SIGKILL)
        answered += [int(line) for line in process.stdout.read().split()]
        process.wait(20)
        unfinished += any("swap" in path.name for path in (tmp_path / "t").iterdir())

        # The active segment may end in a commit that the kill cut short: opening the topic cuts it
        # off.
        assert [
            finding for finding in verify(tmp_path / "t").findings if parse_sealed(finding.file)
        ] == []
        async with running(tmp_path) as store:
            topic = store.require("t")
            result = everything(topic)
            assert topic.next_offset >= answered[-1]
            assert topic.damage == []
            assert result == [(offset, payload_of(offset)) for offset, _ in result]
            every = {key_of(offset): offset for offset in range(topic.next_offset)}
            assert latest(result) == every, "the latest record of a key is gone"
            assert len(result) < topic.next_offset
        assert verify(tmp_path / "t").findings == []
    assert unfinished or not SOAK, "no kill ever hit a swap"
