"""The base of nouns, and the parts that several of them share."""

from datetime import datetime

import msgspec


class Noun(msgspec.Struct, rename="camel"):
    """A struct of the contract. Its fields are in camelCase in JSON."""


class TimeRange(Noun):
    """A range of time."""

    from_: datetime = msgspec.field(name="from")
    to: datetime


class Pagination(Noun):
    """The part of a list that a page shows."""

    limit: int
    offset: int
    total: int | msgspec.UnsetType = msgspec.UNSET  # entries in the whole list, if they are counted
