"""Build the docs site and ask its own search, as a reader's browser does."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.tools import ROOT

WORDS = ("lease", "fsync", "outbox", "retry", "backup", "kafka", "schema", "compaction")


def test_search_shows_guides_before_decisions(soak: bool, scratch: Path) -> None:
    if not soak:
        pytest.skip("builds the whole site: make soak")
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    subprocess.run(["make", "docs", f"SITE={scratch}"], cwd=ROOT, check=True, capture_output=True)
    command = [node, ROOT / "tests/docs/search.js", scratch, *WORDS]
    answers = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for word, line in zip(WORDS, answers.splitlines(), strict=True):
        folders = [place.split("/")[0] for place in json.loads(line)]
        assert "how-to" in folders, word
        decisions = [number for number, name in enumerate(folders) if name == "decisions"]
        guides = [number for number, name in enumerate(folders) if name == "how-to"]
        assert not decisions or max(guides) < min(decisions), word
