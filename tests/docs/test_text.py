"""Check that the docs have short blocks and short table cells, and that lists render."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import penstock
from tests.docs.blocks import by_hand, pages
from tests.docs.test_links import without_code
from tests.docs.tools import ROOT

BLOCK_WORDS = 120
CELL_WORDS = 40


def written() -> list[Path]:
    return [page for page in pages() if "decisions" not in page.parts]


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs and items of lists, without tables, headings and code."""
    for part in re.split(r"\n\s*\n", without_code(text)):
        for item in re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", part):
            lines = [line for line in item.splitlines() if not line.lstrip().startswith(("|", "#"))]
            yield "\n".join(lines)


def cells(text: str) -> Iterator[str]:
    for line in without_code(text).splitlines():
        if line.startswith("|"):
            yield from re.split(r"(?<!\\)\|", line.strip("| "))


def test_blocks_are_short() -> None:
    long = [
        f"{page.name}: {len(one.split())} words: {one.strip()[:60]}"
        for page in written()
        for one in paragraphs(by_hand(page))
        if len(one.split()) > BLOCK_WORDS
    ]
    assert long == []


def test_cells_of_tables_are_short() -> None:
    long = [
        f"{page.name}: {len(one.split())} words: {one.strip()[:60]}"
        for page in written()
        for one in cells(by_hand(page))
        if len(one.split()) > CELL_WORDS
    ]
    assert long == []


def test_lists_and_tables_have_room_above_them() -> None:
    """Without it they run into the paragraph before, on the site."""
    item, row = re.compile(r"([-*]|\d+\.) "), re.compile(r"\|")
    for page in (ROOT / "docs").rglob("*.md"):
        lines = without_code(page.read_text()).splitlines()
        for above, line in itertools.pairwise(lines):
            if item.match(line):
                fine = not above or item.match(above.lstrip()) or above.startswith(("  ", "#"))
                assert fine, f"{page.name}: {line}"
            elif row.match(line):
                assert not above or row.match(above) or above.startswith("#"), (
                    f"{page.name}: {line}"
                )


def test_what_is_measured_is_seen() -> None:
    assert [len(one.split()) for one in paragraphs("a b\nc\n\n- d\n- e f\n| g |\n")] == [3, 2, 3]
    assert list(cells("| a | b\\|c |\n")) == ["a ", " b\\|c"]


def test_every_decision_says_what_would_change_our_mind() -> None:
    for page in (ROOT / "docs" / "decisions").glob("*.md"):
        for section in re.split(r"^## ", page.read_text(), flags=re.M)[1:]:
            assert "**What would change our mind.**" in section, f"{page.name}: {section[:60]}"


def test_the_changelog_begins_with_this_release() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    first = re.search(r"^## (\S+)", text, re.M)
    assert first
    assert first[1] in (penstock.__version__, "Unreleased")
