"""The base of nouns, the parts that several of them share, and how an engine makes one."""

from datetime import datetime
from typing import TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)
_MISSING = object()


class Noun(msgspec.Struct, rename="camel"):
    """A struct of the contract. Its fields are in camelCase in JSON."""


class TimeRange(Noun):
    from_: datetime = msgspec.field(name="from")
    to: datetime


class Pagination(Noun):
    """The part of a list that a page shows."""

    limit: int
    offset: int
    total: int | msgspec.UnsetType = msgspec.UNSET  # entries in the whole list, if they are counted


def of(kind: type[T], *sources: object, **more: object) -> T:
    """Return a `kind` with the fields that the sources have by the same name, and `more`."""
    shared = {
        name: value
        for source in sources
        for name in kind.__struct_fields__
        if name not in more and (value := getattr(source, name, _MISSING)) is not _MISSING
    }
    return kind(**shared, **more)
