"""The page of benchmarks: figures as people write them, and no miss is hidden."""

import json
import re
from pathlib import Path

import pytest

from bench import page


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (21281.09, "events/s", "21,300 events/s"),
        (914.3, "messages/s", "914/s"),
        (1_526_000.0, "records/s", "1.53 million records/s"),
        (2.372e8, "bytes/s", "237 MB/s"),
        (0.2503, "s", "0.25 s"),
        (100.0, "%", "100 %"),
        (0, "x", "0 x"),
    ],
)
def test_figures_read_as_people_write_them(value: float, unit: str, text: str) -> None:
    assert page.people(value, unit) == text


def test_ratios_have_as_many_digits_as_they_deserve() -> None:
    assert [page.times(ratio) for ratio in (0.349, 4.21, 37.6)] == ["0.35x", "4.21x", "38x"]


def test_the_page_and_the_readme_have_the_figures_of_the_last_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = json.loads((page.DOCS.parent / "bench" / "results.json").read_text())
    again = "make bench ARGS=--markdown"
    filled = page.pages_with_figures()
    for path in filled:
        text = path.read_text()
        assert text == page.with_figures(text, results), again
    assert page.README in filled
    readme = page.README.read_text()
    ratios = re.findall(r"^\| [^|]* \| [^|]*/s \|.* \| ([\d.]+)x \|[^|]*\|$", readme, re.M)
    gains, losses = map(float, ratios[::2]), map(float, ratios[1::2])
    assert len(ratios) == len(page.CHOSEN)
    for gain, loss in zip(gains, losses, strict=True):
        assert gain >= 1 > loss, "a loss stands below each gain"
    for result in results.values():
        for figure in result["figures"]:
            target = re.fullmatch(r"≥ ([\d.]+)x", figure.get("target") or "")
            if target and figure.get("ratio") is not None:
                shown = float(page.times(figure["ratio"])[:-1])
                assert figure["met"] == (figure["ratio"] >= float(target[1])), figure["name"]
                assert figure["met"] == (shown >= float(target[1])), "it does not look different"
    written = (page.DOCS / "explanation" / "benchmarks.md").read_text()
    monkeypatch.setattr(page, "DOCS", tmp_path)
    assert page.write(results).read_text() == written, again


def test_measured_figures_stand_in_blocks_that_are_made_from_results() -> None:
    """Times below a millisecond, throughputs and "busy machine" are measured, not configured."""
    measured = re.compile(r"\d (?:µs|ns)\b|\d [MG]i?B/s\b|\d+/s per core|busy machine")
    by_hand = [
        f"{path.name}: {match[0]}"
        for path in [page.README, *page.DOCS.rglob("*.md")]
        if "decisions" not in path.parts and path.name != "benchmarks.md"
        if (match := measured.search(page.BLOCK.sub("", path.read_text())))
    ]
    assert by_hand == []


def test_a_miss_is_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "DOCS", tmp_path)
    row = {
        "name": "topics, fsync: 1 in flight",
        "value": 500.0,
        "unit": "messages/s",
        "against": "Redis & others",
        "against_value": 1000.0,
        "ratio": 0.5,
        "target": "≥ 1x",
        "met": False,
        "detail": {"ours_cpu_us": 300.0, "theirs_cpu_us": 100.0},
    }
    machine = {"cores": 2, "system": "Linux", "python": "3.11.7"}
    run = {"at": "2026-01-02T03:04:05Z", "machine": machine, "busy": 0.5, "figures": [row]}
    table = page.write({"peers": json.loads(json.dumps(run))}).read_text()
    assert "| 500/s | Redis & others | 1,000/s | 0.50x | 300 / 100 µs | ≥ 1x **missed** |" in table
    assert "50% busy" in table
