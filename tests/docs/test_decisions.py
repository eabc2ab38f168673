"""The index of decisions lists every decision with the status it has."""

from tests.docs.tools import tool


def test_the_index_of_decisions_is_what_its_tool_makes() -> None:
    decisions = tool("decisions")
    assert decisions.INDEX.read_text() == decisions.index("missing: run tools/decisions")
