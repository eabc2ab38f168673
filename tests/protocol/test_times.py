"""The one parser of times that people and programs write."""

from datetime import UTC, datetime

import pytest

from penstock.errors import InvalidRequest
from penstock.protocol.times import epoch_seconds, time_field, utc_time

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-31T12:00:00Z",
        "2026-01-31T14:00:00+02:00",
        "2026-01-31T14:00:00 02:00",  # the plus as a query string decodes it
        " 2026-01-31 12:00 ",
        "2026-01-31T12",
    ],
)
def test_a_time_is_utc_unless_it_names_a_zone(text: str) -> None:
    assert utc_time(text) == NOON
    assert utc_time(text).tzinfo is UTC
    assert epoch_seconds(text) == NOON.timestamp()


@pytest.mark.parametrize("text", ["soon", "", "0001-01-01T00:00:00+14:00", "2026-13-01T00:00:00Z"])
def test_what_is_no_time_is_refused_by_the_name_of_its_field(text: str) -> None:
    with pytest.raises(InvalidRequest, match="deliverAt must be an ISO 8601 time, not"):
        time_field(text, "deliverAt")
    with pytest.raises(InvalidRequest, match="is not a time"):
        epoch_seconds(text)
