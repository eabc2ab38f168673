"""Decoding bodies whose refusals have texts of their own, and queries of pages and times."""

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec

from penstock.errors import InvalidRequest
from penstock.protocol.times import time_field

T = TypeVar("T")
# what comes before a page is read and thrown away, so pages far down are found by other means
MOST_OFFSET = 10_000
BUCKETS = {"minute": timedelta(minutes=1), "hour": timedelta(hours=1), "day": timedelta(days=1)}
_MISSING = re.compile(r"missing required field `(\w+)`")
_PLACE = re.compile(r" - at `\$\.?(.*?)`$")


def decoder(
    kind: type[T], texts: Mapping[str, str], empty: T | None = None
) -> Callable[[bytes], T]:
    """A function from a body to a `kind`. `texts` maps the name of a field to what is said when it
    is wrong or missing.

    A body that is empty is an error unless `empty` is given. msgspec leaves raw JSON values as they
    are, also when their bytes are no UTF-8: that is looked at here, so that no answer of ours can
    carry it to someone else.
    """
    decode = msgspec.json.Decoder(kind).decode

    def from_body(body: bytes) -> T:
        if not body:
            if empty is not None:
                return empty
            raise InvalidRequest("Empty request body")
        try:
            if not body.isascii():
                body.decode("utf-8")
            return decode(body)
        except msgspec.ValidationError as error:
            raise InvalidRequest(_explain(str(error), texts)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"Invalid JSON: {error}") from None
        except RecursionError:
            raise InvalidRequest("Invalid JSON: nested too deeply") from None

    return from_body


def _explain(problem: str, texts: Mapping[str, str]) -> str:
    place = _PLACE.search(problem)
    missing = _MISSING.search(problem)
    name = (
        missing[1]
        if missing
        else re.sub(r"\[.*?\]", "", place[1]).rpartition(".")[2]
        if place
        else ""
    )
    if name in texts:
        return texts[name]
    return f"Invalid body: {problem.replace('`$.', '`').replace('at `$`', 'at the top')}"


Offset = Annotated[
    int, msgspec.Meta(ge=0, description=f"number of entries to skip, at most {MOST_OFFSET}")
]


def check_offset(offset: int, farther: str) -> None:
    """For `__post_init__` of a query: `farther` says what to do beyond the limit."""
    if offset > MOST_OFFSET:
        raise ValueError(f"offset must be at most {MOST_OFFSET}, not {offset}: {farther}")


class Paged(msgspec.Struct, frozen=True):
    """The query of a listing that is cut by `limit` and `offset`."""

    offset: Offset = 0

    farther: ClassVar[str]

    def __post_init__(self) -> None:
        check_offset(self.offset, self.farther)


class RangeQuery(msgspec.Struct, frozen=True):
    from_: str | None = msgspec.field(name="from", default=None)
    to: str | None = None
    queue: str | None = None
    namespace: str | None = None
    task: str | None = None
    interval: Literal["minute", "hour", "day"] = "hour"

    def range(self, default: timedelta) -> tuple[datetime, datetime]:
        to = time_field(self.to, "to") if self.to else datetime.now(UTC)
        return time_field(self.from_, "from") if self.from_ else to - default, to
