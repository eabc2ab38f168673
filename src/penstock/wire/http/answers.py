"""Encode answers as JSON: add Queen MQ's names, write times in milliseconds, splice in payloads.

A handler returns a struct. If its status differs from the one that the route declares, the handler
builds the response itself from `plain(struct)`.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import Any, get_args, get_origin

import msgspec

from penstock.contract.noun import Noun
from penstock.wire.queen.aliases import ALIASES


def writer_of(kind: Any) -> Callable[[Any], Any]:
    """Return the function that prepares a `kind` for msgspec: `plain`, or the identity."""
    kinds = (kind, *get_args(kind))
    if any(get_origin(one) is dict for one in kinds):
        return plain
    nouns = any(isinstance(one, type) and issubclass(one, Noun) for one in kinds)
    return plain if nouns and _is_converted(msgspec.inspect.type_info(kind), set()) else _same


def _same(value: Any) -> Any:
    return value


def _is_converted(about: Any, seen: set[type]) -> bool:
    """Return whether `plain` changes any part of a type."""
    if isinstance(about, msgspec.inspect.StructType):
        if about.cls in seen:
            return False
        seen.add(about.cls)
        return about.cls in ALIASES or any(_is_converted(one.type, seen) for one in about.fields)
    if isinstance(about, msgspec.inspect.UnionType):
        return any(_is_converted(one, seen) for one in about.types)
    if isinstance(about, msgspec.inspect.ListType):
        return _is_converted(about.item_type, seen)
    return isinstance(
        about,
        msgspec.inspect.AnyType | msgspec.inspect.DateTimeType | msgspec.inspect.DictType,
    )


def plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        fields = {
            name: plain(inner)
            for field, name in _names(type(value))
            if (inner := getattr(value, field)) is not msgspec.UNSET
        }
        aliases = ALIASES.get(type(value))
        return fields if aliases is None else fields | plain(aliases(value))
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, datetime):
        return milliseconds(value)
    if isinstance(value, bytes):
        return msgspec.Raw(value)
    return value


@cache
def _names(kind: type[msgspec.Struct]) -> tuple[tuple[str, str], ...]:
    """Return each field of a struct with its name in JSON."""
    return tuple(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))


def milliseconds(at: datetime | None) -> str | None:
    """Format a time like 2026-01-31T12:00:00.123Z."""
    return (
        None
        if at is None
        else f"{at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"
    )


def microseconds(at: datetime) -> str:
    """Format a time like 2026-01-31T12:00:00.123456Z."""
    return f"{at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"
