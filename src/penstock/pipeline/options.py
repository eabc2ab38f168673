"""Options of sources and sinks: read once, checked at once, with errors that name the option and
what it may be.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from penstock.errors import InvalidRequest
from penstock.net.tls import ca_text
from penstock.protocol.times import utc_time

BROKER_PATIENCE_SECONDS = 60.0  # for a broker that restarts (option brokerTimeout)
EARLIEST, LATEST = -2, -1  # as in Kafka's connector
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)")
UNIT_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
MOMENT = "milliseconds since 1970 or a time such as 2026-01-31T12:00:00Z"
T = TypeVar("T")
D = TypeVar("D")
Positions = int | dict[str, int]  # one for all topics, or per topic

# How to reach a broker and its database: the same for every source and sink, so that a program
# keeps them in one place.
REACH = {"broker", "url", "database", "databaseSchema", "token", "ca"}
REACH |= {"brokerTimeout", "databaseTimeout"}
# What Spark adds of its own, beside names that begin with two underscores; the second line is of a
# table USING penstock.
SPARKS = {"path", "paths", "checkpointLocation", "queryName"}
SPARKS |= {"provider", "owner", "location", "external", "is_managed_location"}
SOURCE = REACH | {"group", "failOnDataLoss", "minPartitions", "maxTriggerDelay"}
SOURCE |= {"startingOffsets", "startingTimestamp", "endingTimestamp"}
SOURCE |= {"maxOffsetsPerTrigger", "minOffsetsPerTrigger"}
TOPIC_SOURCE = SOURCE | {"topic", "topics", "subscribe", "topicPattern", "subscribePattern"}
TOPIC_SOURCE |= {
    "directory",
    "tier",
    "archive",
    "firstPartition",
    "maxBytesPerTrigger",
    "maxRecordsPerPartition",
}
TOPIC_SOURCE |= {"endingOffsets", "startingOffsetsByTimestamp", "endingOffsetsByTimestamp"}
QUEUE_SOURCE = SOURCE | {"queue", "assign", "readDatabase", "encrypted"}
QUEUE_SOURCE |= {"fromXid", "toXid", "waitForTransactions"}
TOPIC_SINK = REACH | {"topic", "appId", "orderBy", "batchId"}
QUEUE_SINK = REACH | {"queue", "appId", "orderBy", "batchId", "payloadFormat"}


class Options:
    """A view of the options Spark hands over: all strings, names without regard to case."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}

    def text(self, *names: str, default: str | None = None) -> str | None:
        """The first of the names that is given."""
        for name in names:
            if (value := self._given.get(name.lower())) is not None:
                return value
        return default

    def refuse_others(self, allowed: set[str], what: str) -> None:
        """A misspelt option is an error that names the nearest, not a setting without effect."""
        names = {name.lower(): name for name in allowed}
        passed = {name.lower() for name in SPARKS}
        for name in self._given:
            if name in names or name in passed or name.startswith(("__", "option.")):
                continue
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {names[near[0]]!r}? It" if near else "it"
            raise InvalidRequest(
                f"{what} has no option {name!r}; {hint} has {', '.join(sorted(allowed))}"
            )

    def require(self, name: str, why: str) -> str:
        """The option's text; InvalidRequest says `why` it is needed when it is missing."""
        value = self.text(name)
        if not value:
            raise InvalidRequest(f"the option {name!r} is missing: {why}")
        return value

    def token(self) -> str | None:
        """For brokers that ask for one. Read on the driver, not in an executor's environment."""
        return self.text("token") or os.environ.get("PENSTOCK_TOKEN") or None

    def ca(self) -> str | None:
        """The certificates of the CA to believe with `tls://` and `https://`: the option `ca` names
        a file on the driver, or holds its text. It is the text that goes to executors."""
        return ca_text(self.text("ca"))

    def _parsed(self, name: str, default: D, parse: Callable[[str], T], wanted: str) -> T | D:
        """What `parse` makes of the option; a ValueError means that it is not what is `wanted`."""
        value = self.text(name)
        try:
            return default if value is None else parse(value)
        except ValueError:
            raise InvalidRequest(f"the option {name!r} is {wanted}, not {value!r}") from None

    def whole(self, name: str, default: D, least: int = 1) -> int | D:
        """A whole number that is not below `least`."""

        def parse(value: str) -> int:
            if not value.strip().lstrip("-").isdecimal() or int(value) < least:
                raise ValueError
            return int(value)

        return self._parsed(name, default, parse, f"a whole number from {least} on")

    def seconds(self, name: str, default: float) -> float:
        return self._parsed(name, default, float, "a number of seconds")

    def duration(self, name: str, default: float) -> float:
        """Seconds, given with a unit as Spark takes them: 500ms, 30s, 15m, 2h."""

        def parse(value: str) -> float:
            if (match := DURATION.fullmatch(value.strip().lower())) is None:
                raise ValueError
            return float(match[1]) * UNIT_SECONDS[match[2]]

        return self._parsed(name, default, parse, "a time with its unit such as 30s or 15m")

    def flag(self, name: str, default: bool) -> bool:

        def parse(value: str) -> bool:
            return bool(("false", "true").index(value.lower()))

        return self._parsed(name, default, parse, "true or false")

    def names(self, name: str) -> list[str]:
        """A list separated by commas."""
        return [part.strip() for part in (self.text(name) or "").split(",") if part.strip()]

    def positions(self, name: str, default: int) -> Positions:
        """earliest, latest, or JSON: an offset (-2 earliest, -1 latest) per topic."""

        def parse(value: str) -> Positions:
            if value.lower() in ("earliest", "latest"):
                return EARLIEST if value.lower() == "earliest" else LATEST
            offsets: dict[str, int] = _json_object(value)
            if not all(type(at) is int and at >= EARLIEST for at in offsets.values()):
                raise ValueError
            return offsets

        wanted = 'earliest, latest or JSON such as {"orders": 42}'
        return self._parsed(name, default, parse, wanted)

    def moment(self, name: str) -> int | None:
        """Milliseconds since 1970, given as such or as an ISO time (UTC when it names no zone)."""
        return self._parsed(name, None, _milliseconds, MOMENT)

    def moments(self, name: str) -> dict[str, int] | None:
        """JSON with a moment per topic. Kafka's form, which has a moment per partition of a topic,
        is taken too: a topic here is what a partition is there, and has the number 0."""

        def parse(value: str) -> dict[str, int]:
            if not (given := _json_object(value)):
                raise ValueError
            moments = {}
            for topic, at in given.items():
                if isinstance(at, dict) and set(at) != {"0"}:
                    raise InvalidRequest(
                        f"the option {name!r} names partitions of topic {topic!r}: a topic has "
                        'one, "0"'
                    )
                one = Options({name: str(at["0"] if isinstance(at, dict) else at)})
                moments[topic] = one._parsed(name, 0, _milliseconds, MOMENT)
            return moments

        wanted = 'JSON such as {"orders": "2026-01-31T12:00:00Z"}'
        return self._parsed(name, None, parse, wanted)


def _json_object(value: str) -> dict[str, Any]:
    decoded: Any = json.loads(value)
    if not isinstance(decoded, dict):
        raise ValueError
    return decoded


def _milliseconds(value: str) -> int:
    if value.lstrip("-").isdecimal():
        return int(value)
    return round(utc_time(value).timestamp() * 1000)
