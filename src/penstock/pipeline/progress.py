"""Describe the progress of a streaming query: its topic or queue, its offsets, and its lag.

Spark's progress has the offsets of sources as JSON. For ours these say, per topic, the next offset;
for a queue, the transaction up to which it was read, and with the latest offset how many messages
wait (up to a limit) and how old a standby's answer is.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Position:
    """A position in one topic or queue, after a batch."""

    name: str  # "topic orders"
    place: str  # "offsets 0 to 99"
    lag: int | None = None  # records or messages behind; None when it is not known
    unit: str = "records"
    at_least: bool = False  # the lag was counted up to a limit
    standby_seconds: float | None = None  # how old a standby's answer may be

    def __str__(self) -> str:
        behind = ""
        if self.lag is not None:
            more = "at least " if self.at_least else ""
            unit = self.unit.removesuffix("s") if self.lag == 1 else self.unit
            behind = f", {more}{self.lag:,} {unit} behind" if self.lag else ", up to date"
        stale = self.standby_seconds
        standby = "" if stale is None else f", read from a standby {stale:.1f} s behind"
        return f"{self.name}: {self.place}{behind}{standby}"


def positions(sources: Iterable[Any]) -> list[Position]:
    """Return the positions in all topics and queues of a query's progress."""
    result: list[Position] = []
    for source in sources:
        start, end, latest = (
            _decoded(source[key]) for key in ("startOffset", "endOffset", "latestOffset")
        )
        result += [_queue(start, end, latest)] if "xid" in end else _topics(start, end, latest)
    return result


def in_words(sources: Iterable[Any]) -> str:
    """Describe all sources in one sentence; empty if none of them is ours."""
    return "; ".join(str(position) for position in positions(sources))


def lag_of(sources: Iterable[Any]) -> int | None:
    """Return the lag of all sources in records and messages; None if no source counts."""
    lags = [position.lag for position in positions(sources) if position.lag is not None]
    return sum(lags) if lags else None


def rows_of(progress: Any) -> int:
    """Return how many rows a batch read."""
    return int(_sum_of(progress, "numInputRows"))


def rate_of(progress: Any) -> float:
    """Return the rows per second of a batch."""
    return float(_sum_of(progress, "processedRowsPerSecond"))


def _sum_of(progress: Any, name: str) -> Any:
    """Sum a figure over all sources; Spark Connect does not."""
    total = progress[name]
    return sum(one[name] or 0 for one in progress["sources"]) if total is None else total


def _decoded(text: Any) -> dict[str, Any]:
    """Decode an offset; empty if there is none yet, or it is another source's."""
    try:
        offset = json.loads(text or "null") if isinstance(text, str) else text
    except ValueError:
        return {}
    return offset if isinstance(offset, dict) else {}


def _topics(
    start: dict[str, Any], end: dict[str, Any], latest: dict[str, Any]
) -> Iterator[Position]:
    for topic in {**end, **latest}:
        first, last, newest = (_next(offset, topic) for offset in (start, end, latest))
        if last is None and newest is None:
            continue  # another source's offsets
        lag = None if newest is None else max(0, newest - (last or 0))
        if last is None:
            place = "nothing read yet"
        elif first is not None and first < last:
            place = f"offsets {first} to {last - 1}"
        else:
            place = f"up to offset {last - 1}" if last else "no record yet"
        yield Position(f"topic {topic}", place, lag)


def _next(offset: dict[str, Any], topic: str) -> int | None:
    at = offset.get(topic)
    return int(at["next"]) if isinstance(at, dict) and "next" in at else None


def _queue(start: dict[str, Any], end: dict[str, Any], latest: dict[str, Any]) -> Position:
    since = f"from {start['xid']} " if start.get("xid", "0") != "0" else "up "
    return Position(
        f"queue {end['queue']}",
        f"transactions {since}to {end['xid']}",
        latest.get("waiting"),
        "messages",
        at_least=bool(latest.get("more")),
        standby_seconds=latest.get("behindSeconds"),
    )
