"""Diagrams are drawn from text, and are what their text says."""

import re

import pytest

from tests.docs.tools import ROOT, tool

PAGES = "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))


def test_no_picture_is_stale_and_each_is_on_a_page() -> None:
    pictures = tool("diagrams").pictures()
    assert len(pictures) >= 5
    for path, text in pictures.items():
        assert path.read_text() == text, f"{path.name} is stale: run tools/diagrams"
        assert f"images/{path.name})" in PAGES, f"no page shows {path.name}"


def test_pictures_are_readable_in_the_dark_and_to_those_who_hear_them() -> None:
    for path in (ROOT / "docs" / "images").glob("*.svg"):
        text = path.read_text()
        assert "prefers-color-scheme: dark" in text, path.name
        assert re.search(r'role="img" aria-label="[^"]+"', text), path.name


def test_boxes_stand_apart() -> None:
    diagrams = tool("diagrams")
    for path in diagrams.IMAGES.glob("*.diagram"):
        boxes = list(diagrams.parse(path.read_text()).boxes.values())
        for one in boxes:
            for other in boxes:
                (x, y), (u, v) = one.middle, other.middle
                apart = abs(x - u) >= diagrams.BOX_WIDTH or abs(y - v) >= diagrams.BOX_HEIGHT
                assert one is other or apart, f"{path.name}: {one.name} lies on {other.name}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("box a 0 0 A\narrow a b x", "no such box"),
        ("box a 0 A", "box NAME COLUMN ROW TEXT"),
        ("box a 0 0 a text that is far too long for its box", "too long"),
        ("circle a", "not 'circle'"),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, reason: str) -> None:
    with pytest.raises(AssertionError, match=rf"line \d+: .*{reason}"):
        tool("diagrams").parse(text)
