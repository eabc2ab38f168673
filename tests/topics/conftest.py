"""Tests that ask for `form` run over both formats of segments."""

from collections.abc import Iterator

import pytest

from tests.support import topics


@pytest.fixture(scope="module", params=topics.FORMATS)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """The format of the topics that the test makes."""
    topics.chosen_format = request.param
    yield request.param
    topics.chosen_format = "aiq"


@pytest.fixture(autouse=True)
def default_form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give a test that does not ask for `form` the default, whichever test of its module ran before."""
    before = topics.chosen_format
    if "form" not in request.fixturenames:
        topics.chosen_format = "aiq"
    yield
    topics.chosen_format = before
