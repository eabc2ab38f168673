"""Options of sources and sinks: each is declared once, with its names, its form and its default.

Data frames and pipeline files give options as texts. `read_options` makes one frozen struct of
them, and checks them there; errors name the option and what it may be. A field is the option of the
same name in camel case, and of the other names that its declaration lists.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from penstock.errors import InvalidRequest
from penstock.net.tls import ca_text
from penstock.protocol.times import utc_time

BROKER_PATIENCE_SECONDS = 60.0  # seconds, while a broker restarts
DATABASE_PATIENCE_SECONDS = 60.0
MAX_TRIGGER_DELAY_SECONDS = 900.0
# For transactions that are open when a read is planned; pushes take milliseconds.
TRANSACTION_WAIT_SECONDS = 1.0
RECORDS_PER_TASK = 500_000
QUEUE_TASKS = 4
EARLIEST, LATEST = -2, -1  # as in Kafka's connector
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d|w)")
UNIT_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
Positions = int | dict[str, int]  # one for all topics, or per topic
# Options that Spark adds, beside names that begin with two underscores; the second line is of a
# table USING penstock.
SPARKS = {"path", "paths", "checkpointLocation", "queryName"}
SPARKS |= {"provider", "owner", "location", "external", "is_managed_location"}
Read = TypeVar("Read", bound="ReachOptions")


@dataclass(frozen=True)
class Form:
    """How an option's text is parsed. A ValueError of `parse` means that it is not `wanted`."""

    parse: Callable[[str], Any]
    wanted: str


def _whole(least: int) -> Form:
    def parse(value: str) -> int:
        if not value.strip().lstrip("-").isdecimal() or int(value) < least:
            raise ValueError
        return int(value)

    return Form(parse, f"a whole number from {least} on")


def _one_of(*values: str) -> Form:
    return Form(lambda value: values[values.index(value)], " or ".join(values))


def duration(value: str) -> float:
    if (match := DURATION.fullmatch(value.strip().lower())) is None:
        raise ValueError
    return float(match[1]) * UNIT_SECONDS[match[2]]


def _json_object(value: str) -> dict[str, Any]:
    decoded: Any = json.loads(value)
    if not isinstance(decoded, dict):
        raise ValueError
    return decoded


def _positions(value: str) -> Positions:
    if value.lower() in ("earliest", "latest"):
        return EARLIEST if value.lower() == "earliest" else LATEST
    offsets: dict[str, int] = _json_object(value)
    if not all(type(at) is int and at >= EARLIEST for at in offsets.values()):
        raise ValueError
    return offsets


def _moment(value: str) -> int:
    """Parse a time: milliseconds since 1970, or ISO 8601 (UTC without a zone)."""
    if value.lstrip("-").isdecimal():
        return int(value)
    return round(utc_time(value).timestamp() * 1000)


def _moments(value: str) -> dict[str, int]:
    """Return a time per topic. Kafka's form has a time per partition; here a label such as orders/3
    names a partition, and "0" is the topic's first.
    """
    if not (given := _json_object(value)):
        raise ValueError
    moments = {}
    for topic, at in given.items():
        parts = at if isinstance(at, dict) else {"0": at}
        for number, moment in parts.items():
            label = topic if number == "0" else f"{topic}/{int(number)}"
            moments[label] = _moment(str(moment))
    return moments


def _assigned(value: str) -> tuple[str, list[str]]:
    ((queue, names),) = _json_object(value).items()
    if not queue or not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise ValueError
    return queue, names


TEXT = Form(str, "a text")
EXPRESSION = Form(lambda value: re.compile(value).pattern, "a regular expression")
NAMES = Form(
    lambda value: [part.strip() for part in value.split(",") if part.strip()],
    "names separated by commas",
)
COUNT, NUMBER = _whole(1), _whole(0)
SECONDS = Form(float, "a number of seconds")
INTERVAL = Form(duration, "a time with its unit such as 30s or 15m")
FLAG = Form(lambda value: bool(("false", "true").index(value.lower())), "true or false")
POSITIONS = Form(_positions, 'earliest, latest or JSON such as {"orders": 42}')
MOMENT = Form(_moment, "milliseconds since 1970 or a time such as 2026-01-31T12:00:00Z")
MOMENTS = Form(_moments, 'JSON such as {"orders": "2026-01-31T12:00:00Z"}')
ASSIGNED = Form(_assigned, 'a queue and some of its partitions, such as {"orders": ["eu", "us"]}')


def option(form: Form, default: Any, *names: str) -> Any:
    """Declare an option: its form, its default, and its names if it has others than its field's."""
    about = {"form": form, "names": names}
    if default is list:
        return field(default_factory=list, metadata=about)
    return field(default=default, metadata=about)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)


def option_names(kind: type["ReachOptions"]) -> dict[str, str]:
    """Return the names of all options of a source or sink, each with its field."""
    return {
        name: one.name
        for one in fields(kind)
        for name in one.metadata["names"] or [_camel(one.name)]
    }


def read_options(kind: type[Read], given: Mapping[str, Any]) -> Read:
    """Parse the options of a source or sink into its struct. Raises InvalidRequest. Names
    are the same in any case. Runs on the driver: what is read from its environment goes to
    executors in the struct."""
    names = option_names(kind)
    spelled = {name.lower(): name for name in names}
    passed = {name.lower() for name in SPARKS}
    forms = {one.name: one.metadata["form"] for one in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        if (name := spelled.get(key.lower())) is None:
            if key.lower() not in passed and not key.startswith(("__", "option.")):
                near = difflib.get_close_matches(key.lower(), spelled, 1)
                hint = f"did you mean {spelled[near[0]]!r}? It" if near else "it"
                raise InvalidRequest(
                    f"{kind.title} has no option {key!r}; {hint} has {', '.join(sorted(names))}"
                )
            continue
        form, text = forms[names[name]], as_text(value)
        try:
            parsed = form.parse(text)
        except (ValueError, AttributeError, re.error) as error:
            why = f": {error}" if isinstance(error, re.error) else ""
            raise InvalidRequest(
                f"the option {name!r} is {form.wanted}, not {text!r}{why}"
            ) from None
        if text or form is not TEXT:  # an empty text counts as not given
            earlier = values.get(names[name])
            both = isinstance(earlier, list) and isinstance(parsed, list)
            values[names[name]] = earlier + parsed if both else parsed
    values["token"] = default_token(values.get("token"))
    values["ca"] = ca_text(values.get("ca"))
    return kind(**values)


def default_token(token: str | None) -> str | None:
    """Return the given token, or that of the environment."""
    return token or os.environ.get("PENSTOCK_TOKEN") or None


def as_text(value: Any) -> str:
    """Format an option's value for Spark."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Format options for Spark."""
    return {name: as_text(value) for name, value in options.items()}


@dataclass(frozen=True, kw_only=True)
class ReachOptions:
    """How to reach a broker and its database: the same for every source and sink, so that a program
    keeps them in one place."""

    title: ClassVar[str] = "a connection"

    broker: str | None = option(TEXT, None)
    url: str | None = option(TEXT, None)
    database: str = option(TEXT, "")
    database_schema: str = option(TEXT, "")
    token: str | None = option(TEXT, None)
    ca: str | None = option(TEXT, None)  # a file on the driver, or its text
    broker_timeout: float = option(SECONDS, BROKER_PATIENCE_SECONDS)
    database_timeout: float = option(SECONDS, DATABASE_PATIENCE_SECONDS)


@dataclass(frozen=True, kw_only=True)
class SourceOptions(ReachOptions):
    group: str | None = option(TEXT, None)
    fail_on_data_loss: bool = option(FLAG, True)
    starting_offsets: Positions = option(POSITIONS, EARLIEST)
    starting_timestamp: int | None = option(MOMENT, None)
    ending_timestamp: int | None = option(MOMENT, None)
    max_offsets_per_trigger: int | None = option(COUNT, None)
    min_offsets_per_trigger: int = option(COUNT, 0)
    max_trigger_delay: float = option(INTERVAL, MAX_TRIGGER_DELAY_SECONDS)

    def __post_init__(self) -> None:
        most, least = self.max_offsets_per_trigger, self.min_offsets_per_trigger
        if most is not None and most < least:
            raise InvalidRequest(
                f"the option 'minOffsetsPerTrigger' ({least}) is above "
                f"'maxOffsetsPerTrigger' ({most})"
            )


@dataclass(frozen=True, kw_only=True)
class TopicSourceOptions(SourceOptions):
    title = "a topic source"

    topics: list[str] = option(NAMES, list, "topic", "topics", "subscribe")
    pattern: str | None = option(EXPRESSION, None, "topicPattern", "subscribePattern")
    directory: str | None = option(TEXT, None)
    tier: str | None = option(TEXT, None)
    shared_tier: str | None = option(TEXT, None)
    archive: str | None = option(TEXT, None)
    first_partition: bool = option(FLAG, False)
    ending_offsets: Positions = option(POSITIONS, LATEST)
    starting_offsets_by_timestamp: dict[str, int] | None = option(MOMENTS, None)
    ending_offsets_by_timestamp: dict[str, int] | None = option(MOMENTS, None)
    max_bytes_per_trigger: int | None = option(COUNT, None)
    min_partitions: int = option(COUNT, 1)
    max_records_per_partition: int = option(COUNT, RECORDS_PER_TASK)

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.topics) == bool(self.pattern):
            raise InvalidRequest(
                "give either the option 'topic' (names, separated by commas) or 'topicPattern'"
            )
        if not self.broker and not self.directory and not self.database:
            raise InvalidRequest(
                "give the option 'broker' (host:port), 'database' for shared topics, or "
                "'directory' for topics on this host's disk"
            )
        for way in ("starting", "ending"):
            if (
                getattr(self, f"{way}_timestamp") is not None
                and getattr(self, f"{way}_offsets_by_timestamp") is not None
            ):
                raise InvalidRequest(
                    f"give the option '{way}Timestamp' or '{way}OffsetsByTimestamp', not both"
                )

    @property
    def starting_at(self) -> Positions | None:
        """Return when to start, in milliseconds since 1970; None: `starting_offsets` say where."""
        one = self.starting_timestamp
        return self.starting_offsets_by_timestamp if one is None else one

    @property
    def ending_at(self) -> Positions | None:
        return (
            self.ending_offsets_by_timestamp
            if self.ending_timestamp is None
            else self.ending_timestamp
        )

    def refuse_end(self) -> None:
        """Reject the options of an end: a stream has none."""
        if self.ending_offsets != LATEST or self.ending_at is not None:
            raise InvalidRequest(
                "a stream has no end: options that begin with 'ending' are for batch reads"
            )


@dataclass(frozen=True, kw_only=True)
class QueueSourceOptions(SourceOptions):
    title = "a queue source"

    queue: str = option(TEXT, "")
    assign: tuple[str, list[str]] | None = option(ASSIGNED, None)
    read_database: str = option(TEXT, "")
    encrypted: str = option(_one_of("fail", "null"), "fail")
    from_xid: int = option(NUMBER, 0)
    to_xid: int | None = option(COUNT, None)
    wait_for_transactions: float = option(SECONDS, TRANSACTION_WAIT_SECONDS)
    min_partitions: int = option(COUNT, QUEUE_TASKS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name:
            raise InvalidRequest("the option 'queue' is missing: the queue's name")
        if self.queue not in ("", self.name):
            raise InvalidRequest("the options 'queue' and 'assign' name different queues")
        if self.starting_offsets not in (EARLIEST, LATEST):
            raise InvalidRequest(
                "for a queue the option 'startingOffsets' is earliest or latest; use "
                "startingTimestamp"
            )

    @property
    def name(self) -> str:
        return self.assign[0] if self.assign else self.queue


@dataclass(frozen=True, kw_only=True)
class SinkOptions(ReachOptions):
    kind: ClassVar[str]  # topic or queue: the option that names the target
    reached_by: ClassVar[str]  # the option with the broker's address for writes
    address_form: ClassVar[str]

    app_id: str | None = option(TEXT, None)
    order_by: list[str] = option(NAMES, list)
    batch_id: int | None = option(NUMBER, None)  # for `foreachBatch` over Spark Connect

    @property
    def target(self) -> str:
        """Return the topic or queue; "" if rows name their own."""
        return str(getattr(self, self.kind))

    @property
    def address(self) -> str:
        """Return the broker's address for writes. Raises InvalidRequest if it is missing."""
        if not (address := getattr(self, self.reached_by)):
            raise InvalidRequest(
                f"the option {self.reached_by!r} is missing: the broker's {self.address_form}"
            )
        return str(address)


@dataclass(frozen=True, kw_only=True)
class TopicSinkOptions(SinkOptions):
    title, kind = "a topic sink", "topic"
    reached_by, address_form = "broker", "address, host:port"

    topic: str = option(TEXT, "")


@dataclass(frozen=True, kw_only=True)
class QueueSinkOptions(SinkOptions):
    title, kind = "a queue sink", "queue"
    reached_by, address_form = "url", "HTTP address, such as http://127.0.0.1:6632"

    queue: str = option(TEXT, "")
    payload_format: str = option(_one_of("json", "text"), "json")
