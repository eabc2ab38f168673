"""The reference has everything the code has, and says it as the code does."""

import inspect
import re

import pytest
from cyclopts import App

import penstock.client
import penstock.types
from penstock import errors
from penstock.cli import app
from penstock.config.load import leaves
from tests.docs.tools import ROOT, tool

REFERENCE = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    pages: dict[str, str] = tool("reference").pages()
    return pages


def test_no_generated_page_is_stale(made: dict[str, str]) -> None:
    for name, text in made.items():
        written = (REFERENCE / name).read_text()
        assert written == text, f"docs/reference/{name} is stale: run tools/reference"


def test_every_configuration_key_is_there_with_its_meaning() -> None:
    page = (REFERENCE / "configuration.md").read_text()
    headed = re.findall(r"^##+ ([^\n]+)\n(.*?)(?=^##|\Z)", page, re.M | re.S)
    sections = {heading.lower(): text for heading, text in headed}
    keys = list(leaves())
    common = [name for name, _, item in keys if not item.metadata["advanced"]]
    assert 90 < len(common) < 115 < len(keys)
    for name, _, item in keys:
        section, _, key = name.rpartition(".")
        heading = ("advanced: " if item.metadata["advanced"] else "") + (section or "top level")
        row = re.search(rf"^\| `{key}` \|(.*)\|$", sections[heading], re.M)
        assert row, f"{name} is not in the reference"
        assert len(row[1].split("|")[-1].strip()) > 3, f"{name} has no meaning"


def test_every_command_is_there(made: dict[str, str]) -> None:
    assert made  # all modules of the command line are imported now
    page = (REFERENCE / "cli.md").read_text()
    headings = set(re.findall(r"^##+ (penstock .*)$", page, re.M))

    def walk(words: str, command: App) -> list[str]:
        children = [name for name in command if not name.startswith("-")]
        return [words, *(w for name in children for w in walk(f"{words} {name}", command[name]))]

    commands = walk("penstock", app)[1:]
    assert len(commands) > 60
    assert set(commands) == headings


def test_every_error_class_is_there() -> None:
    page = (REFERENCE / "errors.md").read_text()
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    kinds += [kind for _, kind in inspect.getmembers(penstock.client, inspect.isclass)]
    named = [kind.__name__ for kind in kinds if issubclass(kind, errors.PenstockError)]
    assert len(named) > 20
    assert [name for name in named if f"| `{name}` |" not in page] == []


def test_every_public_name_and_method_of_the_client_is_there() -> None:
    page = (REFERENCE / "client.md").read_text() + (REFERENCE / "errors.md").read_text()
    for name in (*penstock.client.__all__, *penstock.types.__all__):
        assert name.endswith("Options") or f"### {name}\n" in page or f"| `{name}` |" in page, name
    exported = vars(penstock.client) | vars(penstock.types)
    for name in ("Client", "AdminClient", "Topic", "Message", "Schedules", "Routes", "Reader"):
        for method, value in inspect.getmembers(exported[name]):
            if not method.startswith("_") and inspect.isfunction(value):
                assert f"#### {name}.{method}\n" in page, f"{name}.{method}"
