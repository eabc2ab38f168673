"""A queue's options: THE table of their names, defaults, limits and meanings.

A field of `QueueOptions` is an option: JSON has its name in camel case, the table `queues` a column
of its name (but `competing` for `ordering`). SQL defaults, the OpenAPI document and
docs/reference/queues.md are compared with it by a test. Every option works or is refused: an
unknown name, a wrong type or a number out of range is an `InvalidRequest`.
"""

import difflib
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
from msgspec import Meta

from penstock.errors import InvalidRequest
from penstock.protocol.queue_options import LARGEST, QueueOptions

ORDERINGS = ("partition", "none")


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


def parse(given: dict[str, Any]) -> QueueOptions:
    """Check options by their JSON names, and add defaults for the others and for None."""
    unknown = [name for name in given if name not in BY_NAME]
    if unknown:
        close = difflib.get_close_matches(unknown[0], BY_NAME, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; the options are {', '.join(BY_NAME)}"
        raise InvalidRequest(f"unknown option: {', '.join(sorted(unknown))}{hint}")
    return QueueOptions(
        **{
            option.field: option.check(given[option.name])
            for option in OPTIONS
            if given.get(option.name) is not None
        }
    )


def columns_of(options: QueueOptions) -> dict[str, Any]:
    """Return the value of every column of `queues`."""
    return {option.column: option.check(getattr(options, option.field)) for option in OPTIONS} | {
        "competing": options.ordering == "none"
    }


def options_of(row: Any) -> QueueOptions:
    """Return the options of a row of `queues`."""
    values = {option.field: row[option.column] for option in OPTIONS}
    return QueueOptions(**values | {"ordering": ORDERINGS[row["competing"]]})
