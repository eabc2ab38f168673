"""Options of sources and sinks: read once, checked at once, with errors that name the option and
what it may be.
"""

import difflib
import json
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from penstock.errors import InvalidRequest
from penstock.net.tls import ca_text
from penstock.protocol.times import utc_time

BROKER_PATIENCE_SECONDS = 60.0  # for a broker that restarts (option brokerTimeout)
EARLIEST, LATEST = -2, -1  # as in Kafka's connector
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)")
UNIT_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
Positions = int | dict[str, int]  # one for all topics, or per topic

# How to reach a broker and its database: the same for every source and sink, so that a program
# keeps them in one place.
REACH = {
    "broker",
    "url",
    "database",
    "databaseSchema",
    "token",
    "ca",
    "brokerTimeout",
    "databaseTimeout",
}
# What Spark adds of its own, beside names that begin with two underscores.
SPARKS = {"path", "paths", "checkpointLocation", "queryName"}
SPARKS |= {
    "provider",
    "owner",
    "location",
    "external",
    "is_managed_location",
}  # of a table USING penstock
TOPIC_SOURCE = REACH | {
    *(
        "topic",
        "topics",
        "subscribe",
        "topicPattern",
        "subscribePattern",
        "directory",
        "tier",
        "archive",
        "group",
        "failOnDataLoss",
    ),
    *(
        "startingOffsets",
        "endingOffsets",
        "startingTimestamp",
        "endingTimestamp",
        "startingOffsetsByTimestamp",
        "endingOffsetsByTimestamp",
        "maxOffsetsPerTrigger",
        "minOffsetsPerTrigger",
        "maxTriggerDelay",
    ),
    *("maxBytesPerTrigger", "minPartitions", "maxRecordsPerPartition"),
}
QUEUE_SOURCE = REACH | {
    *(
        "queue",
        "assign",
        "startingOffsets",
        "startingTimestamp",
        "endingTimestamp",
        "maxOffsetsPerTrigger",
        "minOffsetsPerTrigger",
        "maxTriggerDelay",
        "minPartitions",
        "readDatabase",
    ),
    *("group", "encrypted", "failOnDataLoss", "fromXid", "toXid", "waitForTransactions"),
}
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

    def refuse_others(self, known: set[str], what: str) -> None:
        """A misspelt option is an error that names the nearest one, not a setting that does
        nothing.
        """
        names = {name.lower(): name for name in known}
        passed = {name.lower() for name in SPARKS}
        for name in self._given:
            if name in names or name in passed or name.startswith(("__", "option.")):
                continue
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {names[near[0]]!r}? It" if near else "it"
            raise InvalidRequest(
                f"{what} has no option {name!r}; {hint} has {', '.join(sorted(known))}"
            )

    def require(self, name: str, why: str) -> str:
        """The option's text; InvalidRequest says `why` it is needed when it is missing."""
        value = self.text(name)
        if not value:
            raise InvalidRequest(f"the option {name!r} is missing: {why}")
        return value

    def token(self) -> str | None:
        """For brokers that ask for one. Read on the driver, so executors need no environment of
        their own.
        """
        return self.text("token") or os.environ.get("PENSTOCK_TOKEN") or None

    def ca(self) -> str | None:
        """The certificates of the CA to believe with `tls://` and `https://`: the option `ca` names
        a file on the driver, or holds its text. It is the text that goes to executors."""
        return ca_text(self.text("ca"))

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int | None:
        """A whole number that is not below `least`."""
        value = self._given.get(name.lower())
        if value is None:
            return default
        if not value.strip().lstrip("-").isdecimal() or int(value) < least:
            raise InvalidRequest(
                f"the option {name!r} is a whole number from {least} on, not {value!r}"
            )
        return int(value)

    def seconds(self, name: str, default: float) -> float:
        """A number of seconds."""
        value = self._given.get(name.lower())
        try:
            return default if value is None else float(value)
        except ValueError:
            raise InvalidRequest(
                f"the option {name!r} is a number of seconds, not {value!r}"
            ) from None

    def duration(self, name: str, default: float) -> float:
        """Seconds, given with a unit as Spark takes them: 500ms, 30s, 15m, 2h."""
        value = self._given.get(name.lower())
        if value is None:
            return default
        match = DURATION.fullmatch(value.strip().lower())
        if match is None:
            raise InvalidRequest(
                f"the option {name!r} is a time with its unit such as 30s or 15m, not {value!r}"
            )
        return float(match[1]) * UNIT_SECONDS[match[2]]

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._given.get(name.lower())
        if value is None:
            return default
        if value.lower() not in ("true", "false"):
            raise InvalidRequest(f"the option {name!r} is true or false, not {value!r}")
        return value.lower() == "true"

    def names(self, name: str) -> list[str]:
        """A list separated by commas."""
        return [part.strip() for part in (self.text(name) or "").split(",") if part.strip()]

    def positions(self, name: str, default: int) -> Positions:
        """earliest, latest, or JSON: an offset (-2 earliest, -1 latest) per topic."""
        value = self._given.get(name.lower())
        if value is None:
            return default
        if value.lower() in ("earliest", "latest"):
            return EARLIEST if value.lower() == "earliest" else LATEST
        wanted = (
            f"the option {name!r} is earliest, latest or JSON such as "
            f'{{"orders": 42}}, not {value!r}'
        )
        try:
            offsets: Any = json.loads(value)
        except ValueError:
            raise InvalidRequest(wanted) from None
        if not isinstance(offsets, dict) or not all(
            type(at) is int and at >= EARLIEST for at in offsets.values()
        ):
            raise InvalidRequest(wanted)
        return offsets

    def moment(self, name: str) -> int | None:
        """Milliseconds since 1970, given as such or as an ISO date and time (UTC when it names no
        zone).
        """
        value = self._given.get(name.lower())
        return None if value is None else _milliseconds(name, value)

    def moments(self, name: str) -> dict[str, int] | None:
        """JSON with a moment per topic. Kafka's form, which has a moment per partition of a topic,
        is taken too: a topic here is what a partition is there, and has the number 0."""
        value = self._given.get(name.lower())
        if value is None:
            return None
        try:
            given: Any = json.loads(value)
        except ValueError:
            given = None
        if not isinstance(given, dict) or not given:
            raise InvalidRequest(
                f"the option {name!r} is JSON such as "
                f'{{"orders": "2026-01-31T12:00:00Z"}}, not {value!r}'
            )
        moments = {}
        for topic, at in given.items():
            if isinstance(at, dict):
                if set(at) != {"0"}:
                    raise InvalidRequest(
                        f"the option {name!r} names partitions of topic {topic!r}: a topic has "
                        'one, "0"'
                    )
                at = at["0"]
            moments[topic] = _milliseconds(name, str(at))
        return moments


def _milliseconds(name: str, value: str) -> int:
    if value.lstrip("-").isdecimal():
        return int(value)
    try:
        return round(utc_time(value).timestamp() * 1000)
    except ValueError:
        raise InvalidRequest(
            f"the option {name!r} is milliseconds since 1970 or a time such as "
            f"2026-01-31T12:00:00Z, not {value!r}"
        ) from None


def topic_path(*names: str) -> str:
    """The HTTP path of a topic, or of what is below it."""
    return "/".join(["/topics", *(quote(name, safe="") for name in names)])
