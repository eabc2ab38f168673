"""The registry of destinations: one module each, discovered, with its keys in the documents."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from penstock.config.schema import SendQueueSettings
from penstock.errors import ConfigError
from penstock.export import destinations
from penstock.export.destinations import BatchRefused, Denied, RetryLater, TooBig
from penstock.export.destinations.http import check_status, parse_retry_after
from penstock.export.spec import parse_route
from penstock.net.http import HttpAnswer

DOCUMENT = Path(__file__).parents[2] / "docs/reference/export.md"
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
    """A package of destinations with one more module in it. Nothing public forgets a destination,
    so the registry is replaced by a copy.
    """
    (tmp_path / "nowhere.py").write_text(MODULE)
    destinations.targets()  # what is imported first now would be registered in the copy only
    monkeypatch.setattr(destinations, "__path__", [*destinations.__path__, str(tmp_path)])
    monkeypatch.setattr(destinations, "_targets", dict(destinations._targets))
    destinations.targets.cache_clear()
    yield
    destinations.targets.cache_clear()
    sys.modules.pop("penstock.export.destinations.nowhere", None)


@pytest.mark.usefixtures("another")
def test_a_new_destination_is_one_file():
    spec = parse_route(
        "r", {"destination": {"type": "nowhere", "place": "here"}}, SendQueueSettings()
    )
    assert spec.target.place == "here"
    with pytest.raises(ConfigError, match=r"destination\.place is missing"):
        parse_route("r", {"destination": {"type": "nowhere"}}, SendQueueSettings())


def test_the_documents_name_every_destination_and_its_keys():
    rows = re.findall(r"^\| (`[a-z_`, ]+) \| (.*?) \|", DOCUMENT.read_text(), re.M)
    documented = {
        name: set(re.findall(r"`(\w+)", takes))
        for names, takes in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    for name, target in destinations.targets().items():
        keys = {field.name for field in dataclasses.fields(target)} - {"type"}
        assert keys <= documented[name], f"{name}: {sorted(keys - documented[name])}"


@pytest.mark.parametrize(
    ("meaning", "statuses"),
    [
        (BatchRefused, [400, 409, 422]),
        (Denied, [302, 401, 403, 404, 405, 410, 415]),
        (TooBig, [413]),
        (RetryLater, [408, 425, 429, 500, 502, 503]),
    ],
)
def test_what_an_answer_means(meaning: type[Exception], statuses: list[int]):
    for status in statuses:
        with pytest.raises(meaning):
            check_status(HttpAnswer(status, {}, b"why"))


def test_an_answer_of_success_means_nothing_else():
    for status in (200, 204):
        check_status(HttpAnswer(status, {}, b""))


def test_retry_after_is_seconds_or_a_date():
    assert parse_retry_after("120") == 120
    assert parse_retry_after(
        "Wed, 21 Oct 2026 07:28:00 GMT", now=1792567680.0 - 90
    ) == pytest.approx(90)
    assert parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert parse_retry_after("soon") is None
    for endless in ("inf", "1e999", "nan"):  # a route must not wait for ever
        assert parse_retry_after(endless) is None
