"""A queue's options: THE table of their names, defaults, limits and meanings.

A field is an option: JSON has its name in camel case, the table `queues` a column of its name (but
`competing` for `ordering`). SQL defaults, the OpenAPI document and docs/queues.md are compared with
it by a test. Every option works or is refused: an unknown name, a wrong type or a number out of
range is an `InvalidRequest`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from penstock.errors import InvalidRequest

LARGEST = 2**31 - 1
ORDERINGS = ("partition", "none")


def _whole(meaning: str, least: int = 0) -> Meta:
    return Meta(ge=least, le=LARGEST, description=meaning)


class QueueOptions(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """The options of one queue, as configured."""

    lease_time: Annotated[int, _whole("seconds a lease lasts; 0 means 60")] = 300
    retry_limit: Annotated[int, _whole("attempts after the first")] = 3
    retry_delay: Annotated[
        int, _whole("milliseconds before the next attempt; strict order waits with it")
    ] = 1000
    delayed_processing: Annotated[
        int, _whole("seconds; a message is delivered when it is that old")
    ] = 0
    window_buffer: Annotated[
        int, _whole("seconds; a partition is delivered when its newest message is that old")
    ] = 0
    max_size: Annotated[
        int, _whole("most messages the slowest group has not answered; 0: no limit")
    ] = 0
    ttl: Annotated[
        int, _whole("seconds; older messages are dropped, counted and deleted; 0: never")
    ] = 0
    priority: Annotated[
        int, _whole("higher first among the queues of a namespace or task", -LARGEST)
    ] = 0
    dead_letter_queue: Annotated[
        bool, Meta(description="false: exhausted messages are dropped and counted")
    ] = True
    dlq_after_max_retries: Annotated[
        bool, Meta(description="false: exhausted messages are dropped and counted")
    ] = True
    retention_enabled: Annotated[
        bool, Meta(description="whether the two options of retention apply")
    ] = False
    retention_seconds: Annotated[int, _whole("older messages are deleted; 0: never")] = 0
    completed_retention_seconds: Annotated[
        int, _whole("older messages that every group has answered are deleted; 0: never")
    ] = 0
    max_wait_time_seconds: Annotated[
        int, _whole("older messages that some group has not answered are deleted; 0: never")
    ] = 0
    encryption_enabled: Annotated[
        bool,
        Meta(description="payloads and headers are sealed with AES-256-GCM before they are stored"),
    ] = False
    ordering: Annotated[
        Literal["partition", "none"],
        Meta(description="partition: one lease at a time, strict order; none: competing consumers"),
    ] = "partition"


@dataclass(frozen=True, slots=True)
class Option:
    """One field of `QueueOptions`."""

    name: str
    field: str
    default: int | bool | str
    least: int
    meaning: str

    @property
    def column(self) -> str:
        return "competing" if self.field == "ordering" else self.field

    def check(self, value: Any) -> Any:
        if isinstance(self.default, bool):
            if not isinstance(value, bool):
                raise InvalidRequest(f"option {self.name} must be true or false")
        elif isinstance(self.default, int):
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidRequest(f"option {self.name} must be a whole number")
            if not self.least <= value <= LARGEST:
                raise InvalidRequest(
                    f"option {self.name} must be between {self.least} and {LARGEST}"
                )
        elif value not in ORDERINGS:
            raise InvalidRequest(f"option {self.name} must be one of: {', '.join(ORDERINGS)}")
        return value


def _option(field: msgspec.structs.FieldInfo) -> Option:
    meta: Meta = get_args(field.type)[1]
    return Option(
        field.encode_name, field.name, field.default, int(meta.ge or 0), meta.description or ""
    )


OPTIONS = tuple(map(_option, msgspec.structs.fields(QueueOptions)))
BY_NAME = {option.name: option for option in OPTIONS}


def columns_of(given: dict[str, Any]) -> dict[str, Any]:
    """The value of every column: what was given, checked, and defaults for the rest. None counts as
    not given.
    """
    unknown = [name for name in given if name not in BY_NAME]
    if unknown:
        raise InvalidRequest(f"unknown option: {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {}
    for option in OPTIONS:
        value = given.get(option.name)
        value = option.default if value is None else option.check(value)
        values[option.column] = value == "none" if option.column == "competing" else value
    return values


def options_of(row: Any) -> QueueOptions:
    """The options of a row of `queues`."""
    values = {option.field: row[option.column] for option in OPTIONS}
    return QueueOptions(**values | {"ordering": ORDERINGS[row["competing"]]})
