"""Appending, reading, waiting, idempotence, retention, compaction: what a topic promises while all
is well.
"""

import asyncio
import errno
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import (
    Conflict,
    InvalidOffset,
    InvalidRequest,
    NotFound,
    StorageFailed,
    StorageFull,
    TooLarge,
    Unavailable,
)
from penstock.log.producers import Producer
from penstock.log.verify import verify
from tests.support.faults import FaultyFs
from tests.support.form import pick
from tests.support.topics import Clock, bits, everything, log_directory, running
from tests.support.wait import eventually

pytestmark = pytest.mark.usefixtures("form")

ME = b"producer-of-test"


def is_durable(fs: FaultyFs) -> bool:
    """Whether all data on this disk would survive the end of the machine."""
    logs = [inode for path, inode in fs.files.items() if path.suffix == ".log"]
    return all(inode.durable == inode.data for inode in logs)


async def test_appends_of_one_tick_share_a_commit(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        topic = await store.create("t")
        commits = store.context.instruments.commits
        futures = [topic.append([b"%d" % i]) for i in range(500)]
        result = [await future for future in futures]
        assert [appended.first_offset for appended in result] == list(range(500))
        assert commits.value() == 1
        while_running = topic.append([b"first"])
        await eventually(lambda: not topic.appends.pending_bytes)  # it is in the pool
        later = [topic.append([b"x"]) for _ in range(5)]
        await asyncio.gather(while_running, *later)
        assert commits.value() == 3


async def test_under_always_every_append_is_its_own_commit(tmp_path: Path) -> None:
    async with running(tmp_path, fsync="always") as store:
        topic = await store.create("t")
        await asyncio.gather(*(topic.append([b"x"]) for _ in range(5)))
        assert store.context.instruments.commits.value() == 5


@settings(max_examples=pick(short=15, usual=40, soak=400), deadline=None)
@given(st.lists(st.binary(max_size=600), min_size=1, max_size=40))
async def test_arrays_and_lists_are_laid_out_alike(
    tmp_path_factory: pytest.TempPathFactory, form: str, payloads: list[bytes]
) -> None:
    directory = tmp_path_factory.mktemp("alike")
    clock = Clock()  # record batches have a time
    async with running(directory, fsync="never", clock=clock) as store:
        listed, arrays = await store.create("listed"), await store.create("arrays")
        lengths = np.array([len(payload) for payload in payloads], ">u4")
        for _ in range(2):
            one = await listed.append(payloads)
            assert await arrays.append_arrays(lengths, memoryview(b"".join(payloads))) == one
        one, other = (log_directory(directory, name, form) for name in ("listed", "arrays"))
        for kind in ("data.log", "index.idx"):
            assert (one / kind).read_bytes() == (other / kind).read_bytes()
        assert arrays.read(0).payloads() == (payloads * 2)[: arrays.read(0).count]


async def test_requests_that_can_never_work_are_refused_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, max_record=10) as store:
        topic = await store.create("t")
        with pytest.raises(InvalidRequest):
            topic.append([])
        with pytest.raises(TooLarge):
            topic.append([b"x", b"x" * 11])
        with pytest.raises(TooLarge):
            topic.append_arrays(np.array([11]), memoryview(b"x" * 11))
        with pytest.raises(InvalidRequest):
            topic.append_arrays(np.array([3, 4]), memoryview(b"x" * 8))
        with pytest.raises(InvalidRequest):
            topic.append([b"x"], Producer(b"short", 0))
        assert topic.next_offset == 0


BAD_NAMES = [
    "",
    ".",
    "..",
    ".penstock",
    "a/b",
    "a\\b",
    "a\0b",
    "a\nb",
    "x" * 250,
    "é" * 125,
    "\ud800",
]


@pytest.mark.parametrize("name", BAD_NAMES)
async def test_a_bad_name_is_refused_before_it_touches_the_disk(tmp_path: Path, name: str) -> None:
    async with running(tmp_path) as store:
        with pytest.raises(InvalidRequest):
            await store.create(name)
    assert [path.name for path in tmp_path.iterdir()] == [".penstock"]


@pytest.mark.parametrize(
    "name", ["x" * 249, "with space & symbols !@#$%^&()_+", "…", ".hidden", "checkpoint"]
)
async def test_any_other_name_works(tmp_path: Path, name: str) -> None:
    async with running(tmp_path) as store:
        await (await store.create(name)).append([b"x"])
    async with running(tmp_path) as store:
        assert store.names() == [name]
        assert store.require(name).next_offset == 1


async def test_creating_is_idempotent_and_deleting_ends_everything(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        topics = await asyncio.gather(*(store.create("t") for _ in range(5)))
        topic = topics[0]
        assert all(other is topic for other in topics)
        await topic.append([b"x"])
        waiting = asyncio.create_task(topic.wait_for(5, 10))
        await asyncio.sleep(0)
        await store.delete("t")
        with pytest.raises(NotFound):
            await waiting
        with pytest.raises(NotFound):
            topic.append([b"y"])
        with pytest.raises(NotFound):
            await store.delete("t")
        assert store.get("t") is None
        again = await store.create("t")
        assert (again.next_offset, again.incarnation == topic.incarnation) == (0, False)
    assert list((tmp_path / ".penstock" / "deleted-topics").iterdir()) == []
    with pytest.raises(Unavailable):
        again.append([b"z"])


async def test_a_retried_batch_is_answered_with_its_first_offsets_and_stored_once(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as store:
        topic = await store.create("t")
        first = await topic.append([b"a", b"b"], Producer(ME, 0))
        both = await asyncio.gather(*(topic.append([b"c"], Producer(ME, 1)) for _ in range(2)))
        assert [(result.first_offset, result.duplicate) for result in both] == [
            (2, False),
            (2, True),
        ]
        again = await topic.append([b"a", b"b"], Producer(ME, 0))
        assert (again.first_offset, again.count, again.duplicate) == (
            first.first_offset,
            2,
            True,
        )
        with pytest.raises(Conflict):
            await topic.append([b"e"], Producer(ME, 3))
        await topic.seal()
        await topic.append([b"d"], Producer(ME, 2))
    for _ in range(2):
        async with running(tmp_path) as store:
            topic = store.require("t")
            for sequence, offset in ((0, 0), (1, 2), (2, 3)):
                result = await topic.append([b"?"], Producer(ME, sequence))
                assert (result.first_offset, result.duplicate) == (offset, True)
            assert [payload for _, payload in everything(topic)] == [b"a", b"b", b"c", b"d"]


async def test_a_producer_that_was_silent_for_long_is_forgotten(tmp_path: Path) -> None:
    clock = Clock()
    async with running(tmp_path, clock=clock, producer_expiry=60) as store:
        await (await store.create("t")).append([b"a"], Producer(ME, 5))
    clock.now += 61
    async with running(tmp_path, clock=clock, producer_expiry=60) as store:
        topic = store.require("t")
        assert topic.producers == 0
        assert not (await topic.append([b"a"], Producer(ME, 5))).duplicate


async def test_reads_stop_at_limits_but_always_give_one_record(tmp_path: Path, form: str) -> None:
    async with running(tmp_path) as store:
        topic = await store.create("t")
        await topic.append([b"x" * 100] * 10)
        assert topic.read(0, 3).count == 3
        assert topic.read(0, 100, 112 * 4).count == 4
        assert topic.read(0, 100, 112 * 4 - 1).count == 3
        assert topic.read(9, 100, 1).payloads() == [b"x" * 100]
        raw = topic.raw(4, 112 * 2 + 5)
        data = (log_directory(tmp_path, "t", form) / "data.log").read_bytes()
        if form == "kafka":  # a batch is handed out whole
            assert (raw.first_offset, raw.count, raw.next_offset) == (0, 10, 10)
            assert raw.read() == data
            return
        assert (raw.first_offset, raw.count, raw.next_offset, raw.position, raw.length) == (
            4,
            2,
            6,
            448,
            224,
        )
        assert raw.read() == data[448:672]
        assert topic.raw(4, 1).count == 1
        assert topic.read(10).count == topic.read(99).count == topic.raw(10, 100).count == 0
        for offset in (11, -1):
            with pytest.raises(InvalidOffset):
                topic.read(offset, strict=True)
        assert topic.read(10, strict=True).count == 0


async def test_waiting_ends_with_the_append_and_subscribers_hear_of_each_commit_once(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as store:
        topic = await store.create("t")
        heard: list[int] = []
        stop = topic.subscribe(lambda: heard.append(topic.next_offset))
        assert await topic.wait_for(0, 0.01) is False
        waiting = asyncio.create_task(topic.wait_for(0, 10))
        await asyncio.sleep(0)
        await asyncio.gather(topic.append([b"a"]), topic.append([b"b"]))
        assert await waiting is True
        assert await topic.wait_for(1) is True
        stop()
        stop()
        await topic.append([b"c"])
        assert heard == [2]


async def test_times_come_from_the_sidecar_and_survive_a_restart(tmp_path: Path, form: str) -> None:
    if form == "kafka":
        pytest.skip("record batches have times of their own, see test_batches.py")
    clock = Clock(1000.0)
    async with running(tmp_path, clock=clock) as store:
        topic = await store.create("t")
        for now, seal in ((1000.0, False), (2000.0, True), (1500.0, False), (3000.0, False)):
            clock.now = now
            await topic.append([b"x"] * 3)
            if seal:
                await topic.seal()
    async with running(tmp_path, clock=clock) as store:
        topic = store.require("t")
        times = topic.timestamps(np.arange(12)).tolist()
        assert times[:3] == [1_000_000_000] * 3
        assert times[3:6] == [2_000_000_000] * 3
        assert times[6:9] == [2_000_000_001] * 3  # the clock went back: time does not
        assert times[9:] == [3_000_000_000] * 3
        wanted = {0: 0, 1000: 0, 1000.5: 3, 2000: 3, 2001: 9, 3000: 9, 3001: 12}
        assert {at: topic.offset_at(at) for at in wanted} == wanted


async def test_retention_by_size_deletes_whole_sealed_segments_oldest_first(
    tmp_path: Path, form: str
) -> None:
    async with running(tmp_path, segment_bytes=500, retention_bytes=3000, fsync="never") as store:
        topic = await store.create("t")
        for _ in range(50):
            await topic.append([b"x" * 88])
        assert len(topic.segments) == 10 if form == "aiq" else len(topic.segments) > 10
        await store.maintain()
        assert topic.size_bytes <= 3000
        assert len(topic.segments) > 2
        first = topic.first_offset
        assert first == topic.segments[0].base > 0
        assert form == "kafka" or first % 5 == 0
        assert [offset for offset, _ in everything(topic, 0)] == list(range(first, 50))
        with pytest.raises(InvalidOffset):
            topic.read(first - 1, strict=True)
    async with running(tmp_path) as store:
        assert (store.require("t").first_offset, store.require("t").damage) == (first, [])


async def test_retention_by_age_keeps_the_active_segment_and_what_is_not_archived(
    tmp_path: Path,
) -> None:
    clock = Clock()
    async with running(tmp_path, clock=clock, retention_age=100, segment_age=50) as store:
        topic = await store.create("t")
        for _ in range(3):
            await topic.append([b"x"])
            clock.now += 60
            await store.maintain()  # rolls by age
        assert [segment.base for segment in topic.segments] == [
            2,
            3,
        ]  # offset 1 is 120 s old by now
        await topic.mark_archived(2)
        clock.now += 1000
        await store.maintain()
        assert topic.first_offset == 2
        with pytest.raises(Conflict):
            await topic.mark_archived(1)
        await topic.mark_archived(3)
        await store.maintain()
        assert (topic.first_offset, topic.next_offset, topic.records) == (3, 3, 0)
    async with running(tmp_path, clock=clock) as store:
        topic = store.require("t")
        assert (topic.first_offset, topic.next_offset, topic.archived_offset, topic.damage) == (
            3,
            3,
            3,
            [],
        )
        assert (await topic.append([b"y"])).first_offset == 3


async def test_compaction_swaps_segments_under_readers_and_keeps_offsets_and_times(
    tmp_path: Path, form: str
) -> None:
    if form == "kafka":
        pytest.skip("only aiq's layout is compacted by a list of offsets")
    clock = Clock(1000.0)
    async with running(tmp_path, clock=clock) as store:
        topic = await store.create("t")
        for i in range(4):
            clock.now = 1000.0 + i
            await topic.append([b"%d-%d" % (i, j) for j in range(10)], Producer(ME, i))
            if i < 3:
                await topic.seal()
        held = topic.raw(12, 1 << 20)
        before = dict(everything(topic))
        keep = np.array([0, 3, 9, 15, 29])
        await topic.set_policy("compact")
        await store.compact("t", [0, 10, 20], bits(keep, 30))
        assert held.read().endswith(b"1-9")  # whoever was reading reads on
        wanted = [(offset, before[offset]) for offset in (*keep.tolist(), *range(30, 40))]
        assert everything(topic) == wanted
        assert topic.read(4).first_offset == 9
        assert topic.timestamps(np.array([0, 15, 29, 30])).tolist() == [
            1e9,
            1.001e9,
            1.002e9,
            1.003e9,
        ]
        with pytest.raises(Conflict, match="not neighbouring sealed segments"):
            await store.compact("t", [10], bits(keep, 30))
    assert verify(tmp_path / "t").findings == []
    async with running(tmp_path, clock=clock) as store:
        topic = store.require("t")
        assert everything(topic) == wanted
        assert topic.damage == []
        assert (await topic.append([b"?"], Producer(ME, 3))).duplicate


async def test_a_full_disk_refuses_clearly_and_works_again_when_there_is_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.io.space.CHECK_SECONDS", 0.0)

    fs = FaultyFs()
    async with running(Path("/data"), fs=fs, free_space_reserve=1000) as store:
        topic = await store.create("t")
        await topic.append([b"x"])
        fs.free = 1050
        with pytest.raises(StorageFull):
            await topic.append([b"y" * 100])
        with pytest.raises(StorageFull):
            await topic.append([b"y" * 100])
        fs.free = 1 << 30
        assert (await topic.append([b"z"])).first_offset == 1
        fs.fail(1, errno.ENOSPC, only={"append"}, forever=True)
        with pytest.raises(StorageFull):
            await topic.append([b"y"])
        fs.heal()
        assert (await topic.append([b"w"])).first_offset == 2
        assert [payload for _, payload in everything(topic)] == [b"x", b"z", b"w"]


@pytest.mark.parametrize("policy", ["group", "interval"])
async def test_after_a_failed_fsync_the_segment_is_closed_and_a_new_one_goes_on(
    policy: str,
) -> None:
    fs = FaultyFs()
    async with running(Path("/data"), fs=fs, fsync=policy, fsync_interval=0.001) as store:
        topic = await store.create("t")
        await topic.append([b"one"])
        await eventually(lambda: is_durable(fs))
        await topic.appends.drain()
        fs.fail(1, errno.EIO, only={"sync"})
        if policy == "group":
            with pytest.raises(StorageFailed):
                await topic.append([b"two"])
            assert topic.broken
        else:
            await topic.append(
                [b"two"]
            )  # answered before its fsync, which fails: moved to a new segment
            await eventually(store.context.instruments.broken.value)
            await topic.appends.drain()
        failed = fs.failed
        await topic.append([b"three"])
        assert fs.failed == failed == 1
        assert topic.broken is None
        wanted = [b"one", b"three"] if policy == "group" else [b"one", b"two", b"three"]
        assert [payload for _, payload in everything(topic)] == wanted
        assert [(segment.base, segment.rows) for segment in topic.segments] == [
            (0, 1),
            (1, len(wanted) - 1),
        ]


async def test_what_was_answered_moves_to_a_new_segment_when_the_fsync_of_a_roll_fails() -> None:
    fs = FaultyFs()
    async with running(Path("/data"), fs=fs, fsync="interval", fsync_interval=60) as store:
        topic = await store.create("t")
        await topic.append([b"one"])
        fs.fail(1, errno.EIO, only={"sync"})
        with pytest.raises(StorageFailed):
            await topic.seal()
        await eventually(lambda: topic.broken is None)  # and nobody appends meanwhile
        await topic.appends.drain()
        assert is_durable(fs)
        assert [payload for _, payload in everything(topic)] == [b"one"]


async def test_what_a_roll_has_synced_stays_when_its_renames_fail() -> None:
    fs = FaultyFs()
    async with running(Path("/data"), fs=fs, fsync="interval", fsync_interval=60) as store:
        topic = await store.create("t")
        await topic.append([b"one"])
        fs.fail(1, errno.EIO, only={"rename"})
        with pytest.raises(StorageFailed):
            await topic.seal()
        await topic.append([b"two"])
        assert topic.broken is None
        assert [payload for _, payload in everything(topic)] == [b"one", b"two"]


async def test_a_topic_that_stops_broken_tries_no_repair_after_that() -> None:
    fs = FaultyFs()
    async with running(Path("/data"), fs=fs, fsync="interval", fsync_interval=0.001) as store:
        topic = await store.create("t")
        fs.fail(1, errno.EIO, forever=True, only={"sync"})
        await topic.append([b"one"])
        await eventually(lambda: topic.broken)
    assert topic._segments._timer is None  # it would fire later, and nothing public tells


Operation = st.one_of(
    st.tuples(st.just("append"), st.lists(st.binary(max_size=60), min_size=1, max_size=12)),
    st.tuples(st.just("arrays"), st.lists(st.binary(max_size=60), min_size=1, max_size=12)),
    st.tuples(st.just("producer"), st.lists(st.binary(max_size=20), min_size=1, max_size=3)),
    st.tuples(st.sampled_from(["seal", "reopen", "retain", "close"]), st.just([])),
)


@settings(max_examples=pick(short=10, usual=30, soak=300), deadline=None)
@given(
    st.lists(Operation, max_size=25),
    st.sampled_from(["group", "interval", "never"]),
    st.integers(1, 50),
)
async def test_a_topic_is_a_list_with_a_moving_start(
    tmp_path_factory: pytest.TempPathFactory,
    form: str,
    operations: list[tuple[str, list[bytes]]],
    policy: str,
    read_size: int,
) -> None:
    directory = tmp_path_factory.mktemp("model")
    model: list[bytes] = []
    sequence = 0
    options = {"fsync": policy, "segment_bytes": 300, "retention_bytes": 1500}
    async with running(directory, **options) as store:
        topic = await store.create("t")
    while True:
        async with running(directory, **options) as store:
            topic = store.require("t")
            reopen = False
            while operations and not reopen:
                what, payloads = operations.pop(0)
                if what == "append":
                    assert (await topic.append(payloads)).first_offset == len(model)
                elif what == "arrays":
                    lengths = np.array([len(payload) for payload in payloads], ">u4")
                    result = await topic.append_arrays(lengths, memoryview(b"".join(payloads)))
                    assert result.first_offset == len(model)
                elif what == "producer":
                    for duplicate in (False, True):
                        result = await topic.append(payloads, Producer(ME, sequence))
                        assert (result.first_offset, result.duplicate) == (
                            len(model),
                            duplicate,
                        )
                    sequence += 1
                elif what == "seal":
                    await topic.seal()
                elif what == "retain":
                    await store.maintain()
                elif what == "close":
                    await topic.appends.drain()
                    await topic.close_if_idle(0.0)
                reopen = what == "reopen"
                model += payloads
            assert topic.next_offset == len(model)
            first = topic.first_offset
            assert everything(topic, 0, read_size) == list(enumerate(model))[first:]
            raw = topic.raw(first, 1 << 20)
            assert raw.count == topic.segments[0].rows or not raw.count
            assert topic.records == len(model) - first
            assert topic.damage == []
        assert verify(log_directory(directory, "t", form)).findings == []
        if not operations:
            return


async def test_a_roll_ends_when_the_directory_is_gone(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        topic = await store.create("t")
        await topic.append([b"x"])
        await asyncio.to_thread(shutil.rmtree, topic.directory)
        async with asyncio.timeout(30):
            with pytest.raises(StorageFailed):
                await topic.seal()
        await store.delete("t")
