"""The index of decisions lists every decision with the status it has."""

import importlib.machinery
import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_index_of_decisions_is_what_its_tool_makes():
    loader = importlib.machinery.SourceFileLoader("decisions", str(ROOT / "tools" / "decisions"))
    spec = importlib.util.spec_from_loader("decisions", loader)
    assert spec
    tool = importlib.util.module_from_spec(spec)
    loader.exec_module(tool)
    assert tool.INDEX.read_text() == tool.index("missing: run tools/decisions")


def test_links_between_decisions_lead_somewhere():
    for page in (ROOT / "docs").rglob("*.md"):
        for line in page.read_text().splitlines():
            for target in line.split("](")[1:]:
                name = target.partition(")")[0].partition("#")[0]
                if name.endswith(".md") and "://" not in name:
                    assert (page.parent / name).exists(), f"{page.name} links to {name}"
