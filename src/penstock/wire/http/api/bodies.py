"""Decoding bodies whose refusals have texts of their own, and the forms of time in answers."""

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from penstock.errors import InvalidRequest
from penstock.wire.http.messages import Response, json_response

T = TypeVar("T")
# what comes before a page is read and thrown away, so pages far down are found by other means
MOST_OFFSET = 10_000
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


Offset = Annotated[int, msgspec.Meta(ge=0, description=f"0 to {MOST_OFFSET}")]


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


def milliseconds(at: datetime | None) -> str | None:
    """2026-01-31T12:00:00.123Z"""
    return (
        None
        if at is None
        else f"{at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"
    )


def microseconds(at: datetime) -> str:
    """2026-01-31T12:00:00.123456Z"""
    return f"{at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"


def answer(value: Any, status: int = 200) -> Response:
    """JSON with its times in milliseconds and payloads (bytes) spliced in as the JSON they are;
    structs have their names in camel case.
    """
    return json_response(plain(value), status)


def plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {
            name: plain(inner)
            for field, name in _names(type(value))
            if (inner := getattr(value, field)) is not msgspec.UNSET
        }
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, datetime):
        return milliseconds(value)
    if isinstance(value, bytes):
        return msgspec.Raw(value)
    return value


def headers_of(headers: dict[str, str] | None) -> dict[str, Any]:
    """`headers` of a message for its answer, which has none where the message has none."""
    return {} if headers is None else {"headers": headers}


def fields(value: msgspec.Struct, *names: str) -> dict[str, Any]:
    """Some fields of a struct, with their names in camel case."""
    return {name: plain(getattr(value, field)) for field, name in _named(names)}


@cache
def _names(kind: type[msgspec.Struct]) -> tuple[tuple[str, str], ...]:
    """Its fields and what they are called in JSON."""
    return _named(kind.__struct_fields__)


@cache
def _named(names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((name, _camel(name)) for name in names)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
