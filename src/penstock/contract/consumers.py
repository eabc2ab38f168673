"""Running consumers, as they report themselves."""

from datetime import datetime
from typing import Annotated

import msgspec

from penstock.contract.noun import Noun

MAX_REPORTS = 1000  # of one process; the oldest go first
_Text = Annotated[str, msgspec.Meta(max_length=200)]


class ConsumerHealth(Noun, kw_only=True):
    """The status of a running consumer, as it last reported."""

    # Stored in the table `members` in this form: a field that is added needs a default.
    id: _Text
    name: _Text
    queue: _Text
    group: _Text
    hostname: _Text = ""
    pid: int = 0
    concurrency: int = 1
    in_flight: int = 0
    in_flight_seconds: float = 0.0  # since the oldest call under way began
    handled: int = 0
    failed: int = 0
    last_error: Annotated[str, msgspec.Meta(max_length=1000)] | None = None
    last_error_at: datetime | None = None
    problem: Annotated[str, msgspec.Meta(max_length=500)] | None = None  # with its remedy
    started_at: datetime | None = None
    ended: bool = False  # the last report of a consumer that has stopped
    seen_at: datetime | None = None  # time of the last report, by the broker's clock


class Consumers(Noun):
    consumers: list[ConsumerHealth]


class ConsumersReport(Noun):
    consumers: Annotated[list[ConsumerHealth], msgspec.Meta(max_length=MAX_REPORTS)]


class Reported(Noun):
    reported: int
