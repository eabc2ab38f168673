"""The registry of destinations: one module each, discovered, with its keys in the documents."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from penstock.config.schema import SendQueue
from penstock.errors import ConfigError
from penstock.export import destinations
from penstock.export.spec import parse_route

DOCUMENT = Path(__file__).parents[2] / "docs/export.md"
MODULE = """
from dataclasses import dataclass

from penstock.config.schema import key
from penstock.export.destinations import Target, destination


@destination("nowhere")
@dataclass(frozen=True, kw_only=True)
class NowhereTarget(Target):
    needed = ("place",)

    place: str = key("", "which nowhere")

    def make(self, context):
        return None
"""


@pytest.fixture
def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package of destinations with one more module in it."""
    (tmp_path / "nowhere.py").write_text(MODULE)
    monkeypatch.setattr(destinations, "__path__", [*destinations.__path__, str(tmp_path)])
    monkeypatch.setattr(destinations, "_targets", dict(destinations._targets))
    destinations.targets.cache_clear()
    yield
    destinations.targets.cache_clear()
    sys.modules.pop("penstock.export.destinations.nowhere", None)


@pytest.mark.usefixtures("another")
def test_a_new_destination_is_one_file():
    spec = parse_route("r", {"destination": {"type": "nowhere", "place": "here"}}, SendQueue())
    assert spec.target.place == "here"
    with pytest.raises(ConfigError, match=r"destination\.place is missing"):
        parse_route("r", {"destination": {"type": "nowhere"}}, SendQueue())


def test_the_documents_name_every_destination_and_its_keys():
    rows = re.findall(r"^\| (`[a-z`, ]+) \| (.*?) \|", DOCUMENT.read_text(), re.M)
    documented = {
        name: set(re.findall(r"`(\w+)", takes))
        for names, takes in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    for name, target in destinations.targets().items():
        keys = {field.name for field in dataclasses.fields(target)} - {"type"}
        assert keys <= documented[name], f"{name}: {sorted(keys - documented[name])}"
