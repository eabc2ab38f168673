"""Files of a topic deleted, emptied or cut: what any other file knows is never contradicted in
silence.

Whatever is no longer served is reported with its offsets (damage, log, metric, `verify`), and those
are not given again. The one exception is the newest commit of a broker that was killed: files
cannot tell whether it was answered, so it is dropped with a word in the log.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import Damaged, InvalidOffset
from penstock.log.layout import DATA
from penstock.log.producers import Producer
from penstock.log.topic_files import TopicFiles
from penstock.log.verify import verify
from penstock.topics.groups import Groups
from penstock.topics.store import TopicStore
from penstock.topics.topic import Topic
from tests.support.faults import FaultyFs, Inode
from tests.support.form import SOAK, pick
from tests.support.topics import log_directory, running

pytestmark = pytest.mark.usefixtures("form")

PAYLOADS = [b"record %03d " % i + b"x" * (i % 40) for i in range(60)]
NEWEST = 55  # the first offset of the last commit
ROOT = Path("/data")
ENDINGS = ("stopped", "killed", "killed under interval")


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory, form: str) -> dict[str, Path]:
    """Two sealed segments and an active one, as a clean stop and as kill -9 leave them."""
    root = tmp_path_factory.mktemp("lost")

    async def body() -> None:
        for name, policy in (
            ("stopped", "group"),
            ("killed", "group"),
            ("killed under interval", "interval"),
        ):
            async with running(root / "live" / name, fsync=policy, fsync_interval=3600.0) as store:
                topic = await store.create("t")
                for i in range(0, 60, 5):
                    await topic.append(PAYLOADS[i : i + 5], Producer(b"p" * 16, i // 5))
                    if i in (20, 40):
                        await topic.seal()
                await topic.mark_archived(5)
                await topic.set_policy("delete")
                if name != "stopped":
                    shutil.copytree(root / "live" / name, root / name)
        shutil.copytree(root / "live" / "stopped", root / "stopped")

    asyncio.run(body())
    for name in ENDINGS:
        assert verify(log_directory(root / name, "t", form)).findings == []
    return {name: root / name for name in ENDINGS}


def cut(share: float) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    harm.__name__ = f"cut at {share}"
    return harm


def empty(path: Path) -> None:
    path.write_bytes(b"")


# How much of a file is left; None: it was deleted.
SHARES: tuple[float | None, ...] = pick(
    short=(None, 0.3), usual=(None, 0.3, 0.95), soak=(None, 0.0, 0.02, 0.3, 0.67, 0.95, 0.99)
)


def served(topic: Topic) -> dict[int, bytes]:
    collected: dict[int, bytes] = {}
    at = 0
    while at < topic.next_offset:
        try:
            batch = topic.read(at, 7)
        except Damaged as error:
            before, at = at, error.resume or 0
            if at <= before:
                raise
            continue
        collected.update((offset, bytes(payload)) for offset, payload in batch)
        at = batch.next_offset
    return collected


def lost_offsets(topic: Topic) -> set[int]:
    return {
        offset
        for place in topic.damage
        for offset in range(place.get("lost_from", 0), place.get("lost_to", 0))
    }


async def check(fs: FaultyFs, form: str, killed: bool, unknown: int, what: str) -> None:
    """Open twice, and compare what is served with what is reported. No file but the one that was
    harmed knows of offsets from `unknown` on.
    """
    directory = log_directory(ROOT, "t", form)
    before, seen = verify(directory, fs=fs), []
    for start in range(2):
        async with running(ROOT, fs=fs, fsync="never") as store:
            topic = store.require("t")
            reported = {outcome for (outcome,) in store.context.instruments.damage.current()}
            result, lost = served(topic), lost_offsets(topic)
            seen.append((result, lost, topic.next_offset))
            assert all(payload == PAYLOADS[offset] for offset, payload in result.items()), what
            missing = set(range(60)) - result.keys()
            if any(offset < unknown for offset in missing):
                assert not before.sound, what
            if unknown < 60:
                missing = {offset for offset in missing if offset < unknown}
                assert topic.next_offset >= unknown, what
            elif killed and topic.next_offset == NEWEST:
                assert start == 1 or reported & {"unfinished", "quarantined"}, what
                missing -= set(range(NEWEST, 60))
            else:
                assert topic.next_offset >= 60, what
            assert missing <= lost, (what, sorted(missing - lost), topic.damage)
            assert start == 1 or not missing or "lost" in reported, what
            assert not lost & result.keys(), what
            if start == 1:
                assert seen[0] == seen[1], f"{what}: a second start changed something"
                assert (await topic.append([b"next"])).first_offset == seen[0][2]
                assert bytes(topic.read(seen[0][2]).payload(0)) == b"next"
        after = verify(directory, fs=fs)
        assert bool(lost) <= (not after.sound), what


def in_memory(files: dict[str, bytes], form: str) -> FaultyFs:
    fs, directory = FaultyFs(), log_directory(ROOT, "t", form)
    fs.dirs |= {ROOT, directory, *directory.parents}
    fs.files = {directory / name: Inode(data) for name, data in files.items()}
    return fs


@pytest.mark.timeout(1200 if SOAK else 300)
@pytest.mark.parametrize("ending", ENDINGS)
async def test_nothing_is_lost_in_silence(endings: dict[str, Path], ending: str, form: str) -> None:
    directory = log_directory(endings[ending], "t", form)
    whole = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert len(whole) == (14 if form == "aiq" else 10)
    more: list[tuple[str, ...]] = [(), ("checkpoint",), ("checkpoint", "metadata.meta")]
    if SOAK:
        more += [("metadata.meta",), ("batches.crc",), ("index.idx",)]
        more += [
            ("checkpoint", "batches.crc"),
            ("checkpoint", "index.idx"),
            ("checkpoint", "incarnation"),
        ]
        more += [("checkpoint", "metadata.meta", "index.idx")]

    for name, data in sorted(whole.items()):
        for share in SHARES:
            for also in more:
                if name in also or not whole.keys() >= set(also):
                    continue
                # What a commit stores as a record batch is in one file until it is sealed.
                alone = form == "kafka" and ending != "stopped" and name == DATA
                what = f"{ending}: {share} of {name}, without {also}"
                harmed = {**whole, name: data[: int(len(data) * (share or 0))]}
                for other in (*also, *([name] if share is None else ())):
                    del harmed[other]
                try:
                    unknown = 45 if alone else 60
                    fs = in_memory(harmed, form)
                    await check(fs, form, ending != "stopped", unknown, what)
                except Exception as error:
                    error.add_note(what)
                    raise


async def test_everything_but_one_hint_is_gone_and_no_offset_is_given_again(
    endings: dict[str, Path], tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = Path(shutil.copytree(endings["stopped"], tmp_path / "data"))
    hint = "metadata.meta" if form == "aiq" else "index.idx"
    for path in log_directory(data, "t", form).iterdir():
        if path.name != hint:
            path.unlink()

    async with running(data) as store:
        topic = store.require("t")
        assert (topic.first_offset, topic.next_offset) == (60, 60)
        # an index of record batches knows of its own segment only
        first = 0 if form == "aiq" else 45
        assert lost_offsets(topic) == set(range(first, 60))
        with pytest.raises(Damaged, match=f"offsets {first} to 59 are lost") as caught:
            topic.read(first + 10)
        assert caught.value.resume == 60
        with pytest.raises(InvalidOffset):
            topic.read(10, strict=True)
    assert f"{hint} had them" in caplog.text


async def test_who_reads_the_files_beside_the_broker_does_not_pass_over_what_was_lost(
    endings: dict[str, Path], tmp_path: Path, form: str
) -> None:
    data = Path(shutil.copytree(endings["stopped"], tmp_path / "data"))
    directory = log_directory(data, "t", form)
    cut(0.3)(directory / DATA)

    async with running(data) as store:
        topic = store.require("t")
        await topic.append([b"next"])
        lost = sorted(lost_offsets(topic))
        assert lost[-1] == 59
    files = TopicFiles(directory)
    seen: list[int] = []
    with pytest.raises(Damaged, match=f"offsets {lost[0]} to 59 are lost") as caught:
        for piece in files.read(20, 61):
            seen += piece.offsets.tolist()
    assert seen == list(range(20, lost[0]))
    assert caught.value.resume == 60
    assert [piece.offsets.tolist() for piece in files.read(60, 61)] == [[60]]


async def test_a_topic_of_the_original_server_that_was_cut_says_so(tmp_path: Path) -> None:
    original = Path(__file__).parent / "fixtures" / "original" / "data" / "orders"
    shutil.copytree(original, tmp_path / "orders")
    cut(0.5)(tmp_path / "orders" / DATA)

    async with running(tmp_path) as store:
        topic = store.require("orders")
        assert topic.next_offset == 25
        assert lost_offsets(topic) == set(range(25)) - served(topic).keys() != set()


@pytest.mark.parametrize("ending", ["killed", "killed under interval"])
async def test_a_flipped_bit_in_the_active_segment_is_a_hole_after_a_kill(
    endings: dict[str, Path],
    tmp_path: Path,
    ending: str,
    form: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = Path(shutil.copytree(endings[ending], tmp_path / "data"))
    log = log_directory(data, "t", form) / DATA
    content = bytearray(log.read_bytes())
    content[content.index(PAYLOADS[52]) + 3] ^= 1
    log.write_bytes(content)
    batch = set(range(50, 55))

    for start in range(2):
        async with running(data) as store:
            topic = store.require("t")
            assert topic.next_offset >= NEWEST
            assert not batch & served(topic).keys()
            assert batch <= lost_offsets(topic)
            if ending == "killed":
                assert served(topic).keys() == set(range(60)) - batch
            assert bool(store.context.instruments.damage.value("lost")) == (start == 0)
    assert not verify(log_directory(data, "t", form)).sound
    assert "offsets 50 to 5" in caplog.text


@asynccontextmanager
async def grouped(directory: Path, **settings: Any) -> AsyncIterator[tuple[TopicStore, Groups]]:
    async with running(directory, **settings) as store:
        with ThreadPoolExecutor(1) as pool:
            groups = Groups(
                directory / ".penstock" / "groups", store, pool=pool, metrics=store.context.metrics
            )
            await groups.start()
            try:
                yield store, groups
            finally:
                await groups.stop()


def outcomes(store: TopicStore) -> set[str]:
    """What became of damaged group offsets, by the metric."""
    counted = store.context.metrics.values_of("penstock_topic_group_damage_total")
    return {outcome for (outcome,) in counted}


@pytest.fixture
async def committed(endings: dict[str, Path], tmp_path: Path) -> Path:
    """A topic with three groups, killed; its last commit is known to one of them only."""
    data = Path(shutil.copytree(endings["killed"], tmp_path / "live"))
    async with grouped(data, fsync="group") as (_, groups):
        await groups.commit("early", "t", 7)
        await groups.commit("late", "t", 60)
        await groups.commit("middle", "t", 30)
        shutil.copytree(data, tmp_path / "data")
    assert not (tmp_path / "data" / ".penstock" / "groups" / "minutes.log").exists()
    return tmp_path / "data"


async def test_what_a_group_committed_was_there(committed: Path, form: str) -> None:
    log = log_directory(committed, "t", form) / DATA
    log.write_bytes(
        log.read_bytes()[:-1]
    )  # of the last commit, which nothing else proves to be answered

    for _ in range(2):
        async with grouped(committed) as (store, groups):
            topic = store.require("t")
            assert lost_offsets(topic) == set(range(NEWEST, 60))
            assert topic.next_offset == 60
            assert groups.committed("late", "t") == 60
    async with grouped(committed) as (store, groups):
        assert (await store.require("t").append([b"next"])).first_offset == 60
        with pytest.raises(Damaged):
            store.require("t").read(NEWEST)
    assert not verify(log_directory(committed, "t", form)).sound


@pytest.mark.parametrize("harm", [Path.unlink, empty, cut(0.5)], ids=["deleted", "emptied", "cut"])
async def test_lost_group_offsets_are_reported_and_taken_from_the_copy(
    committed: Path, harm: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    private = committed / ".penstock" / "groups"

    async with grouped(committed) as (store, _):
        assert outcomes(store) == set()
    harm(private / "offsets.log")
    async with grouped(committed) as (store, groups):
        assert "restored" in outcomes(store)
        assert {name: groups.committed(name, "t") for name in groups.names()} == {
            "early": 7,
            "late": 60,
            "middle": 30,
        }
    caplog.clear()
    async with grouped(committed) as (store, groups):
        assert outcomes(store) == set()
        assert groups.committed("middle", "t") == 30
    assert not caplog.records


async def test_group_offsets_that_no_file_has_are_reported(
    committed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    private = committed / ".penstock" / "groups"

    async with grouped(committed) as (_, groups):
        await groups.commit("early", "t", 8)  # figures of this minute are written at the end
    for name in ("offsets.log", "offsets.copy"):
        (private / name).unlink()
    async with grouped(committed) as (store, groups):
        assert outcomes(store) == {"lost"}
        assert groups.names() == []
    assert "the committed offsets of early are lost" in caplog.text


async def test_groups_keep_their_offsets_when_a_topic_lost_its_incarnation(
    committed: Path, form: str
) -> None:
    for name in ("incarnation", "checkpoint"):
        (log_directory(committed, "t", form) / name).unlink()

    for start in range(2):
        async with grouped(committed) as (store, groups):
            assert groups.committed("middle", "t") == 30
            assert outcomes(store) == ({"restored"} if start == 0 else set())
    shutil.rmtree(log_directory(committed, "t", form))
    async with grouped(committed) as (store, _):
        assert outcomes(store) == {"lost"}
