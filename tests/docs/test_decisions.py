"""The index of decisions lists every decision with the status it has."""

import re

from tests.docs.tools import tool


def test_the_index_of_decisions_is_what_its_tool_makes() -> None:
    decisions = tool("decisions")
    assert decisions.INDEX.read_text() == decisions.index("missing: run tools/decisions")


def test_a_decision_that_is_superseded_says_by_which_one() -> None:
    root = tool("decisions").ROOT
    replaced = [
        path
        for path in root.glob("[0-9]*.md")
        if re.search(r"^\*\*Status\.\*\*.*superseded", path.read_text(), re.M | re.I)
    ]
    assert replaced
    for path in replaced:
        (by,) = re.findall(r"superseded by \[\d+\]\((.+?)\)", path.read_text(), re.I)
        assert (root / by).exists(), path.name
