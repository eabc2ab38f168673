"""Filters that Spark pushes down to a batch read, so that excluded records are not read.

Spark passes the comparisons of a WHERE clause to the reader of a batch; `date(timestamp) = d`
arrives as a range of times. A reader accepts those that it can apply exactly to every row. Spark
does not apply them again, and `explain("formatted")` lists them as PushedFilters. Spark passes no
filters to the reader of a stream.

Pushdown needs `spark.sql.python.filterPushdown.enabled`, which our sessions set. It is off by
default, and Spark then rejects every reader that defines `pushFilters`. `FilteredReader` also works
in such sessions: it reads everything, and Spark applies the filters.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

EPOCH = datetime.fromtimestamp(0, UTC)


@dataclass
class Interval:
    """Whole numbers from `low` up to, not including, `high`; None: unbounded."""

    low: int | None = None
    high: int | None = None

    def narrow(self, bound: Filter) -> bool:
        """Apply a comparison. Return whether that was possible."""
        number = _whole(getattr(bound, "value", None))
        if number is None:
            return False
        low, high = self.low, self.high
        match bound:
            case EqualTo() | EqualNullSafe():
                low, high = number, number + 1
            case GreaterThanOrEqual():
                low = number
            case GreaterThan():
                low = number + 1
            case LessThan():
                high = number
            case LessThanOrEqual():
                high = number + 1
            case _:
                return False
        self.low = low if self.low is None or low is None else max(self.low, low)
        self.high = high if self.high is None or high is None else min(self.high, high)
        return True

    def filter(self, rows: pa.RecordBatch, values: np.ndarray) -> pa.RecordBatch:
        wanted = np.ones(len(values), bool)
        if self.low is not None:
            wanted &= values >= self.low
        if self.high is not None:
            wanted &= values < self.high
        return rows if wanted.all() else rows.filter(pa.array(wanted))


@dataclass
class Names:
    """The values that a text column may have; None: any."""

    allowed: list[str] | None = None

    def narrow(self, bound: Filter) -> bool:
        """Apply `=` or `IN`. Return whether that was possible."""
        match bound:
            case EqualTo() | EqualNullSafe():
                values = [bound.value]
            case In():
                values = list(bound.value)
            case _:
                return False
        if not all(isinstance(value, str) for value in values):
            return False
        self.allowed = [name for name in dict.fromkeys(values) if name in self]
        return True

    def __contains__(self, name: str) -> bool:
        return self.allowed is None or name in self.allowed


class FilteredReader(DataSourceReader):
    """A batch reader with filters by column. `columns` must never be NULL."""

    def __init__(self, filters: dict[str, Interval | Names], columns: Iterable[str]) -> None:
        self._filters = filters
        self._columns = set(columns)
        self.pushFilters = _Offer(self.take_filters)  # type: ignore[method-assign]

    def take_filters(self, filters: list[Filter]) -> Iterator[Filter]:
        """Apply the filters that this reader supports, and yield the others."""
        for bound in filters:
            path: tuple[str, ...] = getattr(bound, "attribute", ())
            column = path[0] if len(path) == 1 else ""
            if isinstance(bound, IsNotNull) and column in self._columns:
                continue
            if column not in self._filters or not self._filters[column].narrow(bound):
                yield bound


class _Offer:
    """The callable behind `pushFilters`. To sessions without pushdown, it looks like the inherited
    method, so that they accept the reader.
    """

    def __init__(self, take: Callable[[list[Filter]], Iterable[Filter]]) -> None:
        self._take = take

    @property
    def __func__(self) -> Any:
        return DataSourceReader.pushFilters

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        return self._take(filters)


def _whole(value: object) -> int | None:
    """Convert a number, or a time to microseconds since 1970."""
    if isinstance(value, datetime):
        return (value - EPOCH) // timedelta(microseconds=1) if value.tzinfo else None
    return value if type(value) is int else None
