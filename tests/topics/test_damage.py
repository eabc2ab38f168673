"""Damaged files: flip, cut, delete, zero each kind, sealed and active. What is intact is served,
the rest reported.
"""

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import Damaged, StorageFailed
from penstock.log.producers import Producer
from penstock.log.verify import verify
from penstock.topics.topic import Topic
from tests.support.faults import FaultyFs
from tests.support.form import pick
from tests.support.topics import log_directory, running

pytestmark = pytest.mark.usefixtures("form")

PAYLOADS = [b"record %03d " % i + b"x" * (i % 40) for i in range(60)]
ROOT = Path("/data")
FIRST = "00000000000000000000"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory, form: str) -> Path:
    """A topic with two sealed segments and an active one, stopped cleanly."""
    directory = tmp_path_factory.mktemp("pristine") / "data"

    async def body() -> None:
        async with running(directory) as store:
            topic = await store.create("t")
            for i in range(0, 60, 5):
                await topic.append(PAYLOADS[i : i + 5], Producer(b"p" * 16, i // 5))
                if i in (20, 40):
                    await topic.seal()
            await topic.mark_archived(5)
            assert [segment.base for segment in topic.segments] == [0, 25, 45]

    asyncio.run(body())
    assert verify(log_directory(directory, "t", form)).sound
    return directory


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])


def delete(path: Path) -> None:
    path.unlink()


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def readable(topic: Topic) -> dict[int, bytes]:
    """Everything that can be read, going on after each damage where its error says."""
    collected: dict[int, bytes] = {}
    at = topic.first_offset
    while at < topic.next_offset:
        try:
            batch = topic.read(at, 7, 1 << 20)
        except Damaged as error:
            before, at = at, error.resume or -1
            if at <= before:
                raise
            continue
        collected.update((offset, bytes(payload)) for offset, payload in batch)
        assert batch.next_offset > at
        at = batch.next_offset
    return collected


def damaged(
    data: Path, directory: Path, form: str, name: str, harm: Callable[[Path], None]
) -> Path:
    shutil.copytree(data, directory)
    harm(log_directory(directory, "t", form) / name)
    return directory


HARMS = (flip, truncate, delete, zero)
INDEXES = (f"index-{FIRST}.idx", "index.idx")
SIDECARS = (f"batches-{FIRST}.crc", "batches.crc")
HINTS = ("checkpoint", "metadata.meta", "incarnation")
# What each cell of the matrix comes to: how many of the 60 records are served correctly, at least,
# and whether opening reports it ("opening"), or reading does ("reading"), or only `verify`, which
# always does.
MATRIX = [
    # sealed data: a flip in a payload is seen by the checksum only; a cut loses the records behind
    # it
    (f"data-{FIRST}.log", flip, 60 - 1, "verify"),
    (f"data-{FIRST}.log", truncate, 60 - 10, "opening"),
    (f"data-{FIRST}.log", delete, 60 - 25, "opening"),
    (f"data-{FIRST}.log", zero, 60 - 25, "opening"),
    # the active data
    ("data.log", flip, 60 - 1, "verify"),
    ("data.log", truncate, 60 - 7, "opening"),
    ("data.log", delete, 60 - 15, "opening"),
    ("data.log", zero, 60 - 15, "opening"),
    # an index is rebuilt; a flip inside it is seen when it is read
    *((name, flip, 60, "reading") for name in INDEXES),
    # a sidecar tells less, the records are all there
    *((name, flip, 60, "verify") for name in SIDECARS),
    *((name, harm, 60, "opening") for name in (*INDEXES, *SIDECARS) for harm in HARMS[1:]),
    # hints: repaired
    *((name, harm, 60, "opening") for name in HINTS for harm in HARMS),
    *(("archived", harm, 60, "opening") for harm in (flip, truncate, zero)),
]
# The same for record batches, of which each has 5 records and its checksum.
BATCH_MATRIX = [
    (f"data-{FIRST}.log", flip, 60 - 5, "reading"),
    (f"data-{FIRST}.log", truncate, 60 - 10, "opening"),
    (f"data-{FIRST}.log", delete, 60 - 25, "opening"),
    (f"data-{FIRST}.log", zero, 60 - 25, "opening"),
    ("data.log", flip, 60 - 5, "reading"),
    ("data.log", truncate, 60 - 10, "opening"),
    ("data.log", delete, 60 - 15, "opening"),
    ("data.log", zero, 60 - 15, "opening"),
    *((name, harm, 60, "opening") for name in INDEXES for harm in HARMS),
    *(row for row in MATRIX if row[0] in ("checkpoint", "incarnation", "archived")),
]


@pytest.mark.parametrize(
    ("form", "cell"),
    [
        *(("aiq", row) for row in MATRIX),
        *(("kafka", row) for row in BATCH_MATRIX),
    ],
    ids=lambda v: v if isinstance(v, str) else f"{v[0]}-{v[1].__name__}",
    indirect=["form"],
    scope="module",
)
async def test_damage_is_never_silent(
    pristine: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    form: str,
    cell: tuple[str, Callable[[Path], None], int, str],
) -> None:
    name, harm, served, seen_by = cell
    data = damaged(pristine, tmp_path / "data", form, name, harm)
    report = verify(log_directory(data, "t", form))
    assert not report.sound
    assert name in {finding.file for finding in report.findings}

    async with running(data, fsync="never") as store:
        opening = store.context.instruments.damage.current()
        assert bool(opening) == (seen_by == "opening"), opening
        topic = store.require("t")
        result = readable(topic)
        right = [offset for offset, payload in result.items() if payload == PAYLOADS[offset]]
        assert len(right) >= served
        if seen_by != "verify":
            assert len(right) == len(result), "something wrong was served"
        if seen_by == "reading" and form == "aiq":
            assert store.context.instruments.damage.current() == {("walked",): 1}
        if seen_by == "opening":
            assert any(
                name.split("-")[0].split(".")[0] in message for message in caplog.messages
            ), caplog.messages
        appended = await topic.append([b"still working"])
        assert topic.read(appended.first_offset).payloads() == [b"still working"]
    before = dict(result)
    async with running(data, fsync="never") as store:
        result = readable(store.require("t"))
        assert result.pop(appended.first_offset) == b"still working"
        assert result == before, "a second start changed what is served"


def far_away(path: Path) -> None:
    """The first row points behind the end of any file."""
    data = path.read_bytes()
    path.write_bytes(data[:15] + b"\x80" + data[16:])


async def test_an_index_that_points_behind_any_file_is_rebuilt(
    pristine: Path, tmp_path: Path, form: str
) -> None:
    data = damaged(pristine, tmp_path / "data", form, f"index-{0:020d}.idx", far_away)

    async with running(data) as store:
        assert list(readable(store.require("t")).values()) == PAYLOADS


async def test_the_archived_mark_that_cannot_be_read_protects_everything(
    pristine: Path, tmp_path: Path, form: str
) -> None:
    data = damaged(pristine, tmp_path / "data", form, "archived", zero)

    async with running(data, retention_bytes=1) as store:
        await store.maintain()
        assert store.require("t").archived_offset == 0
        assert store.require("t").first_offset == 0


def test_verify_finds_every_single_flipped_bit(pristine: Path, tmp_path: Path, form: str) -> None:
    shutil.copytree(pristine, tmp_path / "data")
    topic = log_directory(tmp_path / "data", "t", form)
    missed = []
    for path in sorted(topic.iterdir()):
        data = path.read_bytes()
        for i in range(0, len(data), pick(short=31, usual=13, soak=1)):
            path.write_bytes(data[:i] + bytes([data[i] ^ (1 << i % 8)]) + data[i + 1 :])
            report = verify(topic)
            if report.sound or path.name not in {finding.file for finding in report.findings}:
                missed.append((path.name, i, report.findings))
        path.write_bytes(data)
    assert missed == []
    assert verify(topic).sound


def test_verify_counts_records_that_no_checksum_covers(tmp_path: Path) -> None:
    original = Path(__file__).parent / "fixtures" / "original" / "data" / "orders"
    report = verify(original)
    assert (report.records, report.unchecked, report.findings) == (25, 25, [])


async def test_verify_of_a_live_topic_stops_at_what_was_visible(tmp_path: Path, form: str) -> None:
    async with running(tmp_path) as store:
        topic = await store.create("t")
        await topic.append(PAYLOADS)
        until = topic.next_offset
        await topic.append(PAYLOADS)
        report = verify(log_directory(tmp_path, "t", form), until=until)
        assert (report.records, report.findings) == (60, [])


async def test_a_roll_that_was_interrupted_is_no_damage(form: str) -> None:
    seen = set()
    for n in count(1):
        fs = FaultyFs()
        async with running(ROOT, fs=fs) as store:
            topic = await store.create("t")
            await topic.append(PAYLOADS)
            fs.fail(n, forever=True, only={"rename"})
            with contextlib.suppress(StorageFailed):
                await topic.seal()
            after, over = (
                fs.crash(Random(n), "keep"),
                fs.failed == 0,
            )  # as a killed process leaves it
            fs.heal()
        report = verify(log_directory(ROOT, "t", form), fs=after)
        assert (report.records, report.findings) == (60, []), n
        seen.add(tuple(after.list_dir(log_directory(ROOT, "t", form))))
        if over:
            break
    assert len(seen) > (6 if form == "aiq" else 4)  # names given away, and taken


@settings(max_examples=pick(short=10, usual=30, soak=400), deadline=None)
@given(data=st.data())
async def test_whatever_happens_to_a_file_the_topic_opens_and_serves_what_is_intact(
    pristine: Path, tmp_path_factory: pytest.TempPathFactory, form: str, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("harm") / "data"
    shutil.copytree(pristine, directory)
    topic = log_directory(directory, "t", form)
    names = sorted(path.name for path in topic.iterdir())
    harmed_data = False
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(names))
        harmed_data |= name.startswith("data")
        content = bytearray((topic / name).read_bytes())
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        match data.draw(st.sampled_from(["flip", "cut", "extend", "overwrite"])):
            case "flip" if content:
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del content[at:]
            case "extend":
                content += data.draw(st.binary(min_size=1, max_size=200))
            case _:
                piece = data.draw(st.binary(min_size=1, max_size=30))
                content[at : at + len(piece)] = piece
        (topic / name).write_bytes(content)

    async with running(directory, fsync="never") as store:
        opened = store.require("t")
        result = readable(opened)
        if not harmed_data:
            # only hints were harmed: no wrong payload, and the index errors that are met leave
            # the data intact
            assert all(PAYLOADS[offset] == payload for offset, payload in result.items())
        appended = await opened.append([b"still working"])
        assert opened.read(appended.first_offset).payloads() == [b"still working"]
