"""A queue's options: the contract's names, their types, defaults and the columns they live in.

Every option works or is refused: an unknown name, a wrong type or a negative number is an
`InvalidRequest`.
"""

from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidRequest

LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    column: str
    default: int | bool | str
    least: int = 0

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


ORDERINGS = ("partition", "none")
OPTIONS = (
    Option("leaseTime", "lease_time", 300),
    Option("retryLimit", "retry_limit", 3),
    Option("retryDelay", "retry_delay", 1000),
    Option("delayedProcessing", "delayed_processing", 0),
    Option("windowBuffer", "window_buffer", 0),
    Option("maxSize", "max_size", 0),
    Option("ttl", "ttl", 0),
    Option("priority", "priority", 0, least=-LARGEST),
    Option("deadLetterQueue", "dead_letter_queue", True),
    Option("dlqAfterMaxRetries", "dlq_after_max_retries", True),
    Option("retentionEnabled", "retention_enabled", False),
    Option("retentionSeconds", "retention_seconds", 0),
    Option("completedRetentionSeconds", "completed_retention_seconds", 0),
    Option("maxWaitTimeSeconds", "max_wait_time_seconds", 0),
    Option("encryptionEnabled", "encryption_enabled", False),
    Option("ordering", "competing", "partition"),
)
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


def options_of(row: Any) -> dict[str, Any]:
    """The options of a row of `queues`, under the contract's names."""
    found = {option.name: row[option.column] for option in OPTIONS}
    found["ordering"] = ORDERINGS[row["competing"]]
    return found
