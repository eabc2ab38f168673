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
