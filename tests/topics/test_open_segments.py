"""Which segments' files are open, and which are opened for what."""

from pathlib import Path

import pytest

from penstock.io.fs import DISK
from penstock.log.aiq.segment import AiqSegment
from penstock.log.context import OpenFiles
from penstock.log.layout import DATA
from penstock.log.segment import Segment
from penstock.topics.topic import Topic
from tests.support.topics import bits, running


@pytest.fixture
def segments(tmp_path: Path) -> list[Segment]:
    made = []
    for number in range(25):
        (tmp_path / f"{number}").mkdir()
        made.append(AiqSegment(DISK, tmp_path / f"{number}", 0, sealed=False))
    return made


def open_one(files: OpenFiles, segment: Segment) -> None:
    segment.on_open = files.opened
    segment.file(DATA)


def test_as_many_segments_stay_open_as_are_allowed(segments: list[Segment]) -> None:
    files = OpenFiles(10)
    for segment in segments[:10]:
        open_one(files, segment)
    assert [segment.open_files for segment in segments[:10]] == [1] * 10
    for segment in segments[10:]:
        open_one(files, segment)
    assert len(files) == 10
    assert [segment.open_files for segment in segments] == [0] * 15 + [1] * 10


def test_segments_that_are_written_to_stay_open_and_others_go_instead(
    segments: list[Segment],
) -> None:
    files = OpenFiles(10)
    for segment in segments[:4]:
        segment.pinned = True
    for segment in segments:
        open_one(files, segment)
    assert len(files) == 10
    assert [segment.open_files for segment in segments] == [1] * 4 + [0] * 15 + [1] * 6


async def fill(topic: Topic, segments: int) -> None:
    """Append sealed segments of ten records, and one record more, to a topic to be compacted."""
    await topic.set_policy("compact")
    for _ in range(segments):
        await topic.append([b"x"] * 10)
        await topic.seal()
    await topic.append([b"x"])


async def test_counting_the_records_after_an_offset_reads_the_segment_that_has_it_only(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as store:
        await fill(await store.create("t"), 4)
        for base in (0, 10, 20, 30):
            await store.compact("t", [base], bits(range(base + 1, base + 10, 2), 10, base))
    async with running(tmp_path) as store:
        topic = store.require("t")
        assert [segment.compacted for segment in topic.segments] == [True] * 4 + [False]

        def opened() -> list[bool]:
            return [bool(segment.open_files) for segment in topic.segments[:-1]]

        assert not any(opened())
        assert [topic.records_from(at) for at in (41, 40, 30, 20, 0)] == [0, 1, 6, 11, 21]
        assert not any(opened()), "the bases and ends of segments say it"
        assert topic.records_from(25) == 6 + 3
        assert opened() == [False, False, True, False]
